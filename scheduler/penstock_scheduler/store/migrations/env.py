"""What alembic runs; the connection comes from `store.schema`, which has begun its transaction."""

from alembic import context

from penstock_scheduler.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
