"""The hub's names for models that were trained with Megatron core: rows per class, and views that they make."""
