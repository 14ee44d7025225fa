"""What extensions may import of xla-core, by purpose: ``docs/architecture.md`` lists the modules."""
