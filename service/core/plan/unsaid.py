"""What sources of published runs leave unsaid, and what is taken for it. All such assumptions are here.

A source's words come first, then what its software did in its year. Each is a function of the row, so that another
table of the same columns is read alike.
"""

from __future__ import annotations

import dataclasses
import re

from service.core.plan import columns, hardware
from service.core.plan.cluster import Cluster
from service.core.plan.columns import Row, Skipped
from service.core.plan.cost import Estimator
from service.core.plan.layout import Layout, Recompute
from service.core.plan.shape import Shape
from service.core.plan.stack import STACKS, Stack


def year(row: Row) -> int:
    """Of the software: what the source's name says, else the GPU's generation."""
    source = row.get("source", "")
    if found := re.search(r"arXiv:?\s*(\d\d)\d\d\.", source):
        return 2000 + int(found[1])
    if found := re.search(r"\b(20[12]\d)", source):
        return int(found[1])
    if found := re.search(r"\bv?(2[2-6])\.\d\d", source):
        return 2000 + int(found[1])
    return {"volta": 2020, "ampere": 2022}.get(getattr(hardware.find(row.get("gpu", "")), "family", ""), 2025)


def software(row: Row, layout: Layout) -> Stack:
    """By the source's software and year; what a row's notes say wins."""
    source, notes = row.get("source", ""), row.get("notes", "") + row.get("source_ref", "")
    text, written = f"{source} {notes}", year(row)
    if "torchtitan" in source:
        if re.search("async ?tp", notes, re.IGNORECASE):
            return STACKS["torchtitan-async"]
        return STACKS["torchtitan-2024" if "compile" in notes or layout.tp > 1 else "torchtitan-eager"]
    if "llm-foundry" in source or layout.zero == 3:
        return STACKS["fsdp"]
    if re.search("bigscience|BLOOM", text, re.IGNORECASE):  # run with CUDA_LAUNCH_BLOCKING=1, says its page
        return dataclasses.replace(STACKS["megatron-deepspeed-2022"], blocking=True)
    if re.search("Megatron-DeepSpeed|GLM-130B|Turing|2201.11990", text, re.IGNORECASE):
        return STACKS["megatron-deepspeed-2022"]
    if re.search("overlap off", text, re.IGNORECASE):
        return STACKS["megatron-core-plain"]
    if re.search("dgxc|NeMo|Nemotron", source):
        return STACKS["nemo-2025"]
    if written <= 2021:
        return STACKS["megatron-2021"]
    if written == 2022:
        return STACKS["megatron-2022"]
    if written == 2023 or "Zero Bubble" in source:
        return STACKS["megatron-2023"]
    return STACKS["megatron-core-2024"]


def heads(row: Row, hidden: int) -> int:
    """BLOOM's first sweeps are of 96 heads at 14400, as their best runs say; its 13824 ones of 64."""
    if given := columns.whole(row, "heads", 0):
        return given
    known = {14400: 96, 14336: 64, 13824: 64}
    if "BLOOM" in row.get("model", "") and hidden in known:
        return known[hidden]
    raise Skipped("heads is not given")


def vocabulary(row: Row) -> int:
    """GPT-2's, padded, for GPTs without one; a head of a few percent."""
    if "2401.10241" in row.get("source", ""):
        return 32000  # its sizes of 14.6 and 28.3 billion leave no room for more
    if re.search("GPT|MT-NLG|Megatron", row.get("model", ""), re.IGNORECASE):
        return 51200
    raise Skipped("vocab is not given")


def layers(row: Row, hidden: int, ffn: int) -> int:
    """What the size says, of those that the stages divide: names of sizes count layers alone."""
    billions, pp = columns.number(row, "n_params_b"), columns.whole(row, "pp", 1)
    if billions is None:
        raise Skipped("layers is not given")
    return max(1, round(billions * 1e9 / (4 * hidden**2 + 2 * hidden * ffn) / pp)) * pp


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Even; else with embedding and head as a layer each; else what is over goes to stages in the middle."""
    if layers % stages == 0:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    each, over = divmod(layers, stages)
    first = (stages - over) // 2
    return tuple(each + (first <= stage < first + over) for stage in range(stages))


def interleaving(layers: int, pp: int) -> int:
    """Where stages were interleaved and nobody says how: pieces of about two layers, at most eight if that divides."""
    able = [v for v in range(2, layers // pp + 1) if layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0]
    few = [v for v in able if v <= 8] or able
    return min(few, key=lambda v: abs(layers / pp / v - 2), default=1)


def zero(row: Row) -> int:
    """Where it is not said: none in 2021 and 2022, the optimizer's state since."""
    if row.get("zero_stage"):
        return columns.whole(row, "zero_stage", 1)
    text = row.get("zero_note", "") + row.get("notes", "")
    if "FSDP" in text:
        return 3
    return 0 if ampere(row) else 1


def sequence_parallel(row: Row) -> bool:
    """Where it is not said: as Megatron-LM has it since 2022 (arXiv 2205.05198), and all that is newer."""
    given = row.get("seq_parallel")
    return given.lower() in ("y", "yes", "true", "1") if given else year(row) >= 2023


def least_recompute(shape: Shape, layout: Layout, batch: int, cluster: Cluster, stack: Stack) -> Layout:
    """Where it is not said: the least that may fit, were the schedule 1F1B, with some doubt of the estimate."""
    estimator = Estimator(shape, batch, cluster, stack, counted="allocator")
    estimator.limit = 1.25 * cluster.gpu.memory
    kinds: tuple[Recompute, ...] = ("none", "cheap") if shape.experts else ("none", "attention", "full")
    plain = dataclasses.replace(layout, schedule="1f1b", vpp=1, stage_layers=stage_layers(shape.layers, layout.pp))
    able = [kind for kind in kinds if estimator.fits(estimator.memory(dataclasses.replace(plain, recompute=kind)))]
    last = kinds[-1] if shape.experts else layout.recompute
    return dataclasses.replace(layout, recompute=able[0] if able else last)


def ampere(row: Row) -> bool:
    return bool(re.search("A100|V100", row.get("gpu", "")))
