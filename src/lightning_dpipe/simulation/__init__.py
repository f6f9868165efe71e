"""From a Plan and a Profile to a predicted Timeline; legality, deadlock, pictures."""
