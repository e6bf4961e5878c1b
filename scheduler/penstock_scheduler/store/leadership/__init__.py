"""Leadership: of several penstockd on one database, one leads and the others stand by. Read in this order:

1. `terms`: when a term is over, and how long a leader may still write. It is pure.
2. `store.leader_table`: the database's side: take a term, confirm it, release it, stand by.
3. `lease`: what a leader asks right before each write.
4. `candidate`: how a penstockd becomes the leader.
5. `leaving`: how it gives the lead up.

docs/decisions/0021-one-leader.md has the argument. The port is `ports.Leadership`.
"""
