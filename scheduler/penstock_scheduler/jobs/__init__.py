"""What is known of a job's speed and progress: its declared and learned models, checked claims, and kin."""
