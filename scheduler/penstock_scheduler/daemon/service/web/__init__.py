"""Web pages: the cluster, the queue, each job, the site. Part of the API's application, over what its endpoints read.

A page is a set of fragments of HTML, each with an id. The first answer has them all in place; then the page's stream sends those
that have changed (`live`), and the browser puts them into the page. So a page that was cut off is right with the next event.
"""
