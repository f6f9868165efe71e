import torch

from lightning_dpipe.sampling.ranks import nearest_ranks


def test_a_rank_counts_the_strictly_nearer_images() -> None:
    references = torch.randn(20, 3, 4, 4)
    samples = torch.randn(7, 3, 4, 4)
    asked = torch.randint(0, 20, (7,))
    ranks = nearest_ranks(samples, references, asked)
    for i in range(7):
        squared = [float((samples[i] - r).square().sum()) for r in references]
        assert ranks[i] == 1 + sum(d < squared[asked[i]] for d in squared)


def test_an_exact_copy_ranks_first() -> None:
    references = torch.randn(20, 3, 4, 4)
    assert nearest_ranks(references, references, torch.arange(20)) == (1,) * 20
