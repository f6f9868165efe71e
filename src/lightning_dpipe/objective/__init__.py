"""The diffusion mathematics: draws, targets, losses, self-conditioning."""
