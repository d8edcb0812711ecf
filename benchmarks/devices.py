"""What the simulator takes a run to cost. Of a GPU nothing was measured here: the numbers are those of others."""

from dataclasses import dataclass

from service.cost_model import CostModel, Sample, fit


@dataclass(frozen=True, slots=True)
class Device:
    """What computes in one replica. `alone`: a run that has it to itself; `pause_seconds`: between runs of a runner.

    `spread`: the deviation of the logarithm of a run's time; the mean is the cost model's.
    """

    name: str
    cost: CostModel
    alone: CostModel
    num_runners: int
    max_batch_tokens: int
    pause_seconds: float = 0.0
    spread: float = 0.0


# `mhsa-serve calibrate` on 2 cores of an AMD EPYC, all-MiniLM-L6-v2, fp32, 30 November 2026: two runners of one thread,
# within 9%. The pause was measured on the same server under load; the spread is what is left of a quiet machine.
_CPU_COST = CostModel(per_run=2.33e-3, per_token=1.114e-4, per_pair=4.39e-8)
CPU = Device(
    "cpu",
    _CPU_COST,
    alone=_CPU_COST.scaled(0.87),
    num_runners=2,
    max_batch_tokens=256,
    pause_seconds=1e-3,
    spread=0.1,
)

# A V100 with BERT-base in fp16 and fused attention on ONNX Runtime, in seconds for B sequences of one length.
# Source: onnxruntime, python/tools/transformers/README.md.
_V100 = (
    Sample(1, 128, 128, 1.45e-3),
    Sample(1, 512, 512, 3.36e-3),
    Sample(4, 512, 128, 2.66e-3),
    Sample(4, 2048, 512, 9.76e-3),
)
_GPU_COST = fit(list(_V100))
# Assumed: one run at a time, as this server does on CUDA; the smallest budget within 3% of the plateau, as it chooses;
# the pause, in which batches are packed and handed back; no spread, since nobody else is on the device.
GPU = Device("gpu", _GPU_COST, _GPU_COST, num_runners=1, max_batch_tokens=8192, pause_seconds=1e-3)

DEVICES = {device.name: device for device in (CPU, GPU)}
