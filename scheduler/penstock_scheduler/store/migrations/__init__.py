"""Migrations of the store's schema, by alembic. Each is one transaction; `penstock db upgrade` runs those that are missing."""
