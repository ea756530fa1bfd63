from tri import *
import tri
Tm=torch.tensor([0.,.7,1.3,0.,1.])
for V in (2,97,1500,9000,40000):
  for (k,p,mp) in [(5,1.,0.),(0,.9,0.),(50,.8,.01),(0,.3,0.),(torch.tensor([0,3,40,1,10**6]),torch.tensor([.9,1.,.5,.2,.95]),0.)]:
   for m,dk in [('match','none'),('typical','none'),('token','logits'),('block','probs'),('token','none')]:
     for sc in (.3,3):
        K=3 if V<9000 else 1
        dt=go(5,K,V,m,dk,T=Tm if V%2 else .7,min_p=mp,top_k=k,top_p=p,scale=sc,nd=torch.tensor([K,0,K-1,K,K]))
  print(V,'done',tri.bad,tri.tot,round(dt,2),flush=True)
