"""`penstock top`: the cluster, the queue and each job in a terminal, from penstockd's API.

`picture.py` fetches what is shown, `cells.py` draws GPUs as cells, `printed.py` prints a picture once, and `app.py` follows the
cluster on the screen, with `screens.py` for one job, the help and questions.
"""
