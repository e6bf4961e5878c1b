"""`penstock observe`: what a site's own history in Slurm's accounting says. It changes nothing, and needs no penstockd."""
