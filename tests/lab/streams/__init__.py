"""A fake accelerator, and programs for it; see device.h."""
