"""What users and accounts may have, and what they have used: limits, budgets, GPU-seconds."""
