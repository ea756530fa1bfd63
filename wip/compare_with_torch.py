import os,sys; os.environ['TRITON_INTERPRET']='1'; sys.path.insert(0,'kernels')
import torch,time,warnings; warnings.filterwarnings('ignore')
torch.set_num_threads(1)
import specdec_kernels; assert 'wt3' in specdec_kernels.__file__
from specdec_kernels import verify_chain
from specdec_kernels._chain_triton import run_chain
torch.manual_seed(0)
bad=0;tot=0
def go(B,K,V,method,draft_kind,T=.7,min_p=0.,nd=None,dtype=torch.float32,top_k=0,top_p=1.0,scale=2):
    global bad,tot
    t=(torch.randn(B,K+1,V)*scale).to(dtype); 
    dl=(t[:,:K].float()+torch.randn(B,K,V)*.7).to(dtype)
    x=torch.stack([torch.distributions.Categorical(logits=dl[:,k].float()).sample() for k in range(K)],1) if K else torch.zeros(B,0,dtype=torch.long)
    if draft_kind=='none' and K: x=t[:,:K].float().argmax(-1)
    seed=torch.arange(B)*7919+3; pos=torch.arange(B)*3+5
    kw={}
    d=None
    if draft_kind=='logits': kw['draft_logits']=dl; d=dl
    if draft_kind=='probs': d=dl.float().softmax(-1); kw['draft_probs']=d
    ref=verify_chain(t,x,**kw,num_draft_tokens=nd,temperature=T,min_p=min_p,top_k=top_k,top_p=top_p,seed=seed,position=pos,method=method)
    a=time.time()
    got=run_chain(t,x,d if method in('token','block') else None,draft_kind if method in('token','block') else 'none',nd,None,K,(T,top_k,top_p,min_p),seed,pos,0,0,method,(.09,.3))
    ok=[torch.equal(g.long(),r.long()) for g,r in zip(got,ref)]
    tot+=1
    if not all(ok):
        bad+=1; print('MISMATCH',B,K,V,method,draft_kind,T if not torch.is_tensor(T) else 'tensor',min_p,top_k,top_p,dtype, [(g!=r).sum().item() for g,r in zip(got,ref)]); print(got[0][:4].tolist(),ref[0][:4].tolist())
    return time.time()-a
M=[('greedy','none'),('match','none'),('typical','none'),('token','none'),('token','logits'),('token','probs'),('block','none'),('block','logits'),('block','probs')]
if __name__=='__main__':
  Tm=torch.tensor([0.,.7,1.3,0.,1.])
  for V in (2,513,1500,9000):
   for K in (0,3):
    for m,dk in M:
        nd=torch.tensor([K,0,max(K-1,0),K,K])
        dt=go(5,K,V,m,dk,T=Tm if (V+K)%2 else .7,nd=nd if K%2 else None,min_p=.02 if V%2 else 0., dtype=torch.bfloat16 if K==3 else torch.float32)
   print(V,'done',bad,tot,round(dt,2))
