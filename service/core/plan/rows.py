"""A published run, as a row of text, and what the cost model makes of it: a case to estimate, or why there is none.

A row's columns are those of a table of published runs (README, "The planner against what others measured"). What
a source does not say is for `unsaid` to assume.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from service.core.plan import columns, hardware, unsaid
from service.core.plan.cluster import Cluster
from service.core.plan.columns import Row, Skipped
from service.core.plan.layout import Layout, Recompute, Schedule
from service.core.plan.shape import Experts, Latent, Shape
from service.core.plan.stack import Kind, Stack

Precision = Literal["bf16", "fp16", "fp8"]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One run. `measured_s` or `measured_bytes` may be missing, not both."""

    number: int
    source: str
    family: str  # sources of one software, so that none is judged with what its like was fitted on
    shape: Shape
    layout: Layout
    global_batch: int
    cluster: Cluster
    stack: Stack
    precision: Precision
    counted: Kind
    measured_s: float | None
    measured_bytes: float | None
    doubtful: str
    out_of_scope: str  # why the bars don't count it; empty where they do

    @property
    def sweep(self) -> tuple[object, ...]:
        """Cases that differ in their layouts alone: one model, batch and cluster."""
        return (
            self.source, self.shape, self.global_batch, self.cluster, self.precision, self.stack.name,
        )  # fmt: skip


def read(number: int, row: Row) -> Case:
    """Raises Skipped with the reason."""
    source = row.get("source", "")
    cluster = _cluster(row)
    shape = _shape(row)
    layout, batch = _layout(row, shape, cluster)
    stack = unsaid.software(row, layout)
    precision = _precision(row)
    seconds = _seconds(row, shape, batch, cluster, layout)
    stored = columns.number(row, "mem_gb_per_gpu")
    unit = 1024**3 if re.search(r"GiB", row.get("notes", "")) else 1e9
    if not row.get("recompute"):
        layout = unsaid.least_recompute(shape, layout, batch, cluster, stack)
    if row.get("outcome", "ok") == "OOM":
        raise Skipped("ran out of memory: there is no step to time")
    if seconds is None and stored is None:
        raise Skipped("neither a step's time nor memory, or in a convention that the row does not say")
    return Case(
        number=number,
        source=source,
        family=family(source),
        shape=shape,
        layout=layout,
        global_batch=batch,
        cluster=cluster,
        stack=stack,
        precision=precision,
        counted="nvidia-smi" if "BigScience" in source or "bigscience" in source else "allocator",
        measured_s=seconds,
        measured_bytes=stored * unit if stored else None,
        doubtful=row.get("doubtful", ""),
        out_of_scope=_out_of_scope(row, shape, layout, precision),
    )


FAMILIES = ("bigscience", "dgxc-benchmarking", "torchtitan", "Megatron-Bridge", "NeMo performance docs", "SimuMax")


def family(source: str) -> str:
    """Sources of one software and cluster: releases of dgxc-benchmarking time the same runs, and so do torchtitan's
    pages; a paper is its number."""
    if found := re.search(r"\d{4}\.\d{5}", source):
        return f"arXiv {found[0]}"
    if "Korthikanti" in source:
        return "arXiv 2205.05198"
    return next((word for word in FAMILIES if word in source), source)


def _out_of_scope(row: Row, shape: Shape, layout: Layout, precision: Precision) -> str:
    if shape.experts:
        return "experts"
    if precision not in ("bf16", "fp16"):
        return f"precision {row.get('precision') or 'not given'}"
    if layout.tp * layout.pp == 1:
        return "neither tensor nor pipeline parallel"
    if "GBS conflict" in row.get("doubtful", ""):
        return row["doubtful"]
    return ""


def _cluster(row: Row) -> Cluster:
    name = row.get("gpu") or ""
    gpu = hardware.find(name)
    if gpu is None:
        raise Skipped(f"no figures are known of a {name or 'GPU without a name'}")
    gpus = columns.whole(row, "n_gpus")
    node = columns.whole(row, "gpus_per_node", gpu.node)
    nic = 0.0
    text = row.get("source", "") + row.get("notes", "")
    if re.search("bigscience|BLOOM|Jean Zay", text, re.IGNORECASE):
        nic = 4 * 12.5e9 / 8  # four Omni-Path links of 100 Gb/s a node of eight: BLOOM's hardware section
    return Cluster(gpu, gpus, gpus_per_node=min(node, max(1, gpus)), nic=nic)


DEEPSEEK_V3 = Latent(1536, 512, 128, 64, 128)


def _shape(row: Row) -> Shape:
    hidden, seq_len = columns.whole(row, "hidden"), columns.whole(row, "seq_len")
    heads = unsaid.heads(row, hidden)
    gated = {"y": True, "n": False}.get(
        row.get("gated_mlp") or "", bool(re.search("llama|mixtral|qwen|deepseek", row.get("model", ""), re.IGNORECASE))
    )
    ffn = columns.whole(row, "ffn_hidden", 0) or (4 * hidden if not gated else 0)
    experts = None
    if count := columns.whole(row, "experts", 0):
        inner = columns.whole(row, "expert_ffn_hidden", 0) or ffn
        if not inner:
            raise Skipped("the experts' size is not given")
        deepseek = "deepseek" in row.get("model", "").lower()
        experts = Experts(
            count, columns.whole(row, "experts_active", 2), inner, inner if deepseek else 0, 3 if deepseek else 0
        )
        if deepseek and columns.whole(row, "layers", 61) < 10:
            experts = dataclasses.replace(experts, first_dense=1)
    elif not ffn:
        raise Skipped("ffn_hidden is not given")
    vocab = columns.whole(row, "vocab", 0) or unsaid.vocabulary(row)
    layers = columns.whole(row, "layers", 0) or unsaid.layers(row, hidden, ffn)
    old = not gated
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=columns.whole(row, "kv_heads", 0) or heads,
        head_dim=int(columns.number(row, "head_dim") or 0) or hidden // heads,
        ffn=ffn or 1,
        vocab=vocab,
        seq_len=seq_len,
        gated=gated,
        dropout=old and "Nemotron" not in row.get("model", "") and "H100" not in row.get("gpu", ""),
        tied=old and unsaid.ampere(row),
        positions=False,
        experts=experts,
        latent=DEEPSEEK_V3 if "deepseek" in row.get("model", "").lower() and heads == 128 else None,
    )


def _layout(row: Row, shape: Shape, cluster: Cluster) -> tuple[Layout, int]:
    tp, pp, cp = columns.whole(row, "tp", 1), columns.whole(row, "pp", 1), columns.whole(row, "cp", 1)
    if not (row.get("tp") or row.get("zero_stage")):
        raise Skipped("the layout is not given")
    dp = max(1, cluster.gpus // (tp * pp * cp))
    if dp * tp * pp * cp != cluster.gpus:
        raise Skipped(f"tp {tp} x pp {pp} x cp {cp} does not divide {cluster.gpus} GPUs")
    batch = columns.whole(row, "gbs")
    schedule, vpp = _schedule(row, pp, shape.layers)
    ep = columns.whole(row, "ep", 1) if shape.experts else 1
    text = row.get("notes", "") + row.get("source_ref", "")
    return (
        Layout(
            dp=dp,
            pp=pp,
            tp=tp,
            cp=cp,
            ep=ep,
            expert_tp=4 if "expert-TP 4" in text else 1,
            vpp=vpp,
            micro_batch=columns.whole(row, "mbs", 1),  # of one sample where it is not said
            schedule=schedule,
            zero=min(unsaid.zero(row), 1) if pp > 1 else unsaid.zero(row),  # a pipeline keeps its weights gathered
            sequence_parallel=tp > 1 and unsaid.sequence_parallel(row),
            recompute=_recompute(row)[0],
            recompute_share=_recompute(row)[1],
            stage_layers=unsaid.stage_layers(shape.layers, pp * vpp),
        ),
        batch,
    )


def _schedule(row: Row, pp: int, layers: int) -> tuple[Schedule, int]:
    text, vpp = row.get("schedule") or "", columns.whole(row, "vpp", 0)
    if pp == 1:
        return "1f1b", 1
    if "ZB-1p" in text:
        return "zb1", 1
    if "ZB-2p" in text:
        return "zb2", 1
    if "DualPipe" in text:
        return "dualpipe", 2
    interleaved = vpp > 1 or bool(re.search("interleaved|1F1B-I", text, re.IGNORECASE))
    if not vpp and (interleaved or (not text and not unsaid.ampere(row))):
        vpp = unsaid.interleaving(layers, pp)
    return ("interleaved_1f1b", vpp) if vpp > 1 else ("1f1b", 1)


def _recompute(row: Row) -> tuple[Recompute, float]:
    text = (row.get("recompute") or "").lower()
    if text.startswith("full"):
        return "full", 1.0
    if "every other layer" in text:
        return "full", 0.5
    if "layer)" in text:
        return "full", 0.5
    if text.startswith("selective"):
        return ("half" if "torchtitan" in row.get("source", "") else "attention"), 1.0
    return "none", 1.0


def _precision(row: Row) -> Precision:
    text = (row.get("precision") or "").lower()
    if text in ("bf16", "amp_bf16"):
        return "bf16"
    if text == "fp16":
        return "fp16"
    if not text:  # nobody trained so large in fp32
        return "bf16"
    if "fp8" in text:
        return "fp8"
    raise Skipped(f"precision {text} is not modelled")


def _seconds(row: Row, shape: Shape, batch: int, cluster: Cluster, layout: Layout) -> float | None:
    """Of a step: as it is given; else from tokens a second; else from FLOP/s in a convention that the row names."""
    if (given := columns.number(row, "iter_time_s")) is not None:
        return given
    tokens = float(batch * shape.seq_len)
    if (rate := columns.number(row, "tokens_per_s_per_gpu")) is not None:
        return tokens / rate / cluster.gpus
    notes = row.get("notes", "")
    rate, share = columns.number(row, "tflops_per_gpu"), columns.number(row, "mfu")
    hardware_flops = "hardware FLOPs" in notes or "96B" in notes or (columns.number(row, "hfu") and not share)
    if rate is None and share is not None:
        rate, hardware_flops = share / 100 * cluster.gpu.peak / 1e12, False
    if rate is None:
        return None
    if "convention" in row.get("doubtful", ""):
        return None
    flops = shape.flops() * tokens
    if hardware_flops or (layout.recompute == "full" and "2104.04473" in row.get("source", "")):
        layers = flops - 6.0 * shape.head * tokens
        flops += layers / 3
    return flops / (rate * 1e12 * cluster.gpus)
