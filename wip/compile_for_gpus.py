import os,sys; os.environ.pop('TRITON_INTERPRET',None); sys.path.insert(0,'kernels')
import triton, time, re, subprocess
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec_kernels import _chain_kernels as ck
import inspect
def compile(kernel, consts, types, target, div=(), warps=8):
    sig={}
    for a in kernel.arg_names:
        if a in consts: sig[a]='constexpr'
        else: sig[a]=types(a)
    attrs={}
    for a in div: attrs[(kernel.arg_names.index(a),)]=[["tt.divisibility",16]]
    return triton.compile(ASTSource(kernel,sig,consts,attrs), target=target, options={'num_warps':warps})
def types(a):
    if a in('target_ptr','draft_ptr'): return '*bf16'
    if a in ('tokens_ptr','num_accepted_ptr','draft_tokens_ptr'): return '*i64'
    if a=='error_ptr': return '*i1'
    if a in('row_token_ptr','row_flag_ptr','row_counter_ptr','request_counter_ptr','cu_ptr','num_draft_ptr'): return '*i32'
    if a.endswith('_ptr'): return '*fp32'
    if a in('temperature','min_p','typical_eps','typical_alpha'): return 'fp32'
    if a in ('seed','position','step'): return 'i64'
    return 'i32'
base=dict(PACKED=False,FLAT=False,RAGGED=False,T_TENSOR=False,MIN_P_TENSOR=False,HAS_MIN_P=False,SEED_TENSOR=False,POSITION_TENSOR=False,CHUNK=16,KP=8)
jobs=[('match',ck.rows_kernel,dict(base,MODE='match',DRAFT='none',STREAM=0,STEP_TENSOR=False,NBP=512,SP=32)),
('typical',ck.rows_kernel,dict(base,MODE='typical',DRAFT='none',STREAM=0,STEP_TENSOR=False,NBP=512,SP=32)),
('ratio',ck.rows_kernel,dict(base,MODE='ratio',DRAFT='logits',STREAM=0,STEP_TENSOR=False,NBP=512,SP=32,HAS_MIN_P=True) ),
('mass',ck.mass_kernel,dict(base,DRAFT='logits',HAS_TAU=False)),
('resid',ck.residual_kernel,dict(base,DRAFT='logits',HAS_TAU=False,BLOCK_RULE=True,NBP=512,SP=32,HAS_MIN_P=True))]
for tname,tgt in [('sm90',GPUTarget('cuda',90,32)),('gfx942',GPUTarget('hip','gfx942',64))]:
  for name,k,c in jobs:
    c=dict(c); c.update(stride_tv=1) if 'stride_tv' in k.arg_names else None
    if 'stride_dv' in k.arg_names: c['stride_dv']=1
    div=[a for a in k.arg_names if a.endswith('_ptr') or a in('stride_tb','stride_tk','stride_db','stride_dk','num_v')]
    t=time.time()
    try: r=compile(k,{a:v for a,v in c.items() if a in k.arg_names},types,tgt,div,warps=8)
    except Exception as e: print(tname,name,'FAIL',str(e)[-600:]); continue
    msg=''
    if tname=='sm90':
        ptx=r.asm['ptx']; 
        cub=r.asm['cubin']; open('/tmp/k.cubin','wb').write(cub)
        d=os.path.dirname(triton.__file__)+'/backends/nvidia/bin/cuobjdump'
        o=subprocess.run([d,'--dump-resource-usage','/tmp/k.cubin'],capture_output=True,text=True).stdout
        msg=re.findall(r'REG:\d+|STACK:\d+|SHARED:\d+|LOCAL:\d+',o), 'v4', len(re.findall(r'ld.global\S*v4',ptx)), 'v2',len(re.findall(r'ld.global\S*v2',ptx)),'scalar b16',len(re.findall(r'ld.global\S*\.b16',ptx))
    else:
        a=r.asm['amdgcn']; msg=re.findall(r'\.vgpr_count:\s+\d+|\.vgpr_spill_count:\s+\d+|\.sgpr_spill_count:\s+\d+|\.group_segment_fixed_size:\s+\d+',a)
    print(tname,name,round(time.time()-t,1),'s',msg)
