"""The Lightning side: strategy, module, launcher, checkpoints, callbacks."""
