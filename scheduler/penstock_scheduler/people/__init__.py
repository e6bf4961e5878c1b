"""What people read: errors, safe text, units, logs, drawings."""
