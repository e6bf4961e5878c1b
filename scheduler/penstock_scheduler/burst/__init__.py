"""Jobs in the cloud: `deciding` which leave and when, and the `manager` of their instances."""
