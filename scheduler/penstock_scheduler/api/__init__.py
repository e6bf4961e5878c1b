"""What programs say to each other: the bodies of the HTTP API and the agents' files, and the API's client."""
