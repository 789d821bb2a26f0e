"""TorchRec over gloo: tables placed whole, updated in the backward pass by FBGEMM."""

from __future__ import annotations

import os

try:
    import torch
    import torch.distributed
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import embeddingbag, model_parallel, planner
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
except ImportError as error:
    raise ImportError(
        "TorchRec cannot be imported. Run `make bench-peers`, which installs it into "
        "build/peers/torchrec, and start from the checkout."
    ) from error

from benchmarks.peers.job import Job, Running

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def start(job: Job) -> Running:
    """Joins the job and makes the tables."""
    if job.wire != "float32":
        raise NotImplementedError("Only a float32 wire is compared with TorchRec.")
    size = len(job.addresses)
    host, port = job.addresses[0].split(":")
    os.environ |= {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    torch.set_num_threads(job.threads)
    torch.distributed.init_process_group("gloo", rank=job.rank, world_size=size)
    model, names = _model(job)
    samples, ids = job.scenario.batch_size, job.scenario.ids_per_sample
    lengths = torch.cat([torch.full((samples,), n, dtype=torch.int32) for n in ids])
    batches = [
        KeyedJaggedTensor(
            keys=names,
            values=torch.cat([torch.from_numpy(f.reshape(-1)).long() for f in batch]),
            lengths=lengths,
        )
        for batch in job.batches()
    ]
    ones = torch.ones(samples, len(names) * job.scenario.dim)

    def step(number: int) -> None:
        model(batches[number % len(batches)]).backward(ones)

    return Running(step, torch.distributed.barrier)


def _model(job: Job) -> tuple[torch.nn.Module, list[str]]:
    names = [f"f{t}" for t in range(len(job.rows))]
    size = len(job.addresses)

    class Bags(torch.nn.Module):
        """Sums of the rows of each sample."""

        def __init__(self) -> None:
            super().__init__()
            self.bags = torchrec.EmbeddingBagCollection(
                device=torch.device("meta"),
                tables=[
                    torchrec.EmbeddingBagConfig(
                        name=f"t{t}",
                        embedding_dim=job.scenario.dim,
                        num_embeddings=rows,
                        feature_names=[names[t]],
                        pooling=torchrec.PoolingType.SUM,
                    )
                    for t, rows in enumerate(job.rows)
                ],
            )

        def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
            return self.bags(batch).values()

    sharder = embeddingbag.EmbeddingBagCollectionSharder(
        fused_params={"optimizer": _OPTIMIZERS[job.optimizer], "learning_rate": 0.01}
    )
    fused = EmbeddingComputeKernel.FUSED.value
    choose = planner.EmbeddingShardingPlanner(
        topology=planner.Topology(
            world_size=size, compute_device="cpu", local_world_size=size
        ),
        constraints={
            f"t{t}": ParameterConstraints(
                sharding_types=["table_wise"], compute_kernels=[fused]
            )
            for t in range(len(job.rows))
        },
    )
    model = Bags()
    plan = choose.collective_plan(model, [sharder], torch.distributed.group.WORLD)
    parallel = model_parallel.DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    return parallel, names
