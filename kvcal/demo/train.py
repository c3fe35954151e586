"""Train the embedded `tiny` model from plain text: tokenizer, weights, int8 packing, held-out curve.

    python -m kvcal.demo.train --text books.txt.xz --output OUT [--steps 1500]

Takes any UTF-8 text file (.txt or .txt.xz); documents may be separated by lines `<|endoftext|>`.
One GPU is assumed for the default size; `--steps 20 --batch 4 --device cpu` is a smoke run.
The weights are stored as int8 rows with one float16 scale a row, and the rounded weights ARE the model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

SEPARATOR = "<|endoftext|>"
BOS, EOS = "<|bos|>", "<|eos|>"


def read_documents(path: Path) -> list[str]:
    data = path.read_bytes()
    raw = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    return [part.strip() for part in raw.split(f"\n{SEPARATOR}\n") if part.strip()]


def train_tokenizer(documents: list[str], vocab: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def encode_stream(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    """All documents as one int64 stream, each opened by BOS."""
    pieces = [np.asarray(e.ids, dtype=np.int64) for e in tokenizer.encode_batch(documents)]
    return torch.from_numpy(np.concatenate(pieces))


def build_model(args: argparse.Namespace, vocab: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=args.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config)


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def windows_at(stream: Tensor, starts: Tensor, context: int) -> Tensor:
    """(N, context) windows; the first token is always BOS, as the tokenizer makes it at inference."""
    block = stream[starts[:, None] + torch.arange(context, device=stream.device)]
    block[:, 0] = 0
    return block


@torch.no_grad()
def heldout_loss(model: PreTrainedModel, stream: Tensor, context: int, device: torch.device) -> float:
    """Mean nats per token over consecutive held-out windows."""
    starts = torch.arange(0, len(stream) - context, context, device=stream.device)
    total, count = 0.0, 0
    for group in starts.split(32):
        ids = windows_at(stream, group, context)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        total += torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        ).item()
        count += ids[:, 1:].numel()
    return total / count


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes and float16 scale (one a row), nearest rounding of the float32 weight."""
    scale = (weight.float().abs().amax(1) / 127).clamp_min(6e-8).half()
    codes = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return codes, scale


def pack(model: PreTrainedModel) -> dict[str, Tensor]:
    packed: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        if tensor.ndim == 2:
            packed[f"{name}.q"], packed[f"{name}.s"] = quantise_rows(tensor)
            tensor.copy_(packed[f"{name}.q"].float() * packed[f"{name}.s"].float()[:, None])
        else:
            packed[name] = tensor.to(torch.float16)
            tensor.copy_(packed[name].float())
    return {name: tensor.cpu().contiguous() for name, tensor in packed.items()}


def write_tokenizer(tokenizer: Tokenizer, out: Path, context: int) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    out = Path(args.output)
    out.mkdir(parents=True, exist_ok=True)
    text = prepare(Path(args.text), out, args, device)
    model: PreTrainedModel = build_model(args, text.tokenizer.get_vocab_size()).train().to(device)
    curve = run_steps(model, text, args, device)
    write_model(model, text, curve, out, args, device)


@dataclass(frozen=True)
class Prepared:
    """A text split into documents to train on and held-out ones, as tokens on the device."""

    source: Path
    tokenizer: Tokenizer
    train_docs: list[str]
    heldout_docs: list[str]
    stream: Tensor
    heldout: Tensor
    heldout_bytes: int

    def bits_per_byte(self, nats: float) -> float:
        return round(nats * len(self.heldout) / self.heldout_bytes / math.log(2), 4)


def prepare(source: Path, out: Path, args: argparse.Namespace, device: torch.device) -> Prepared:
    """Train the tokenizer, write it, and encode the text with it."""
    documents = read_documents(source)
    random.Random(args.seed).shuffle(documents)
    count = max(1, round(len(documents) * 0.06))
    heldout_docs, train_docs = documents[:count], documents[count:]
    started = time.time()
    tokenizer = train_tokenizer(train_docs, args.vocab)
    write_tokenizer(tokenizer, out, args.context)
    stream = encode_stream(tokenizer, train_docs).to(device)
    share = 64 * args.context // len(heldout_docs)
    heldout = torch.cat([encode_stream(tokenizer, [d])[:share] for d in heldout_docs]).to(device)
    heldout_bytes = len(tokenizer.decode(heldout.tolist()).encode())
    print(f"{len(stream)} training tokens, {len(heldout)} held-out tokens, {time.time() - started:.0f} s", flush=True)
    return Prepared(source, tokenizer, train_docs, heldout_docs, stream, heldout, heldout_bytes)


def optimizer_of(model: PreTrainedModel, args: argparse.Namespace, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )


def run_steps(
    model: PreTrainedModel, text: Prepared, args: argparse.Namespace, device: torch.device
) -> list[dict[str, float]]:
    """Train; returns the losses now and then. Shortens args.steps to --budget-seconds."""
    optimizer = optimizer_of(model, args, device)
    runner = torch.compile(model) if device.type == "cuda" else model
    generator = torch.Generator(device=device).manual_seed(args.seed)
    curve: list[dict[str, float]] = []
    started = warm = time.time()
    step = -1
    while (step := step + 1) < args.steps:
        if args.budget_seconds and step == 80:  # compiled and warm since step 20: fit the schedule into the time
            synchronize(device)
            rate = (time.time() - warm) / 60
            args.steps = min(args.steps, int((args.budget_seconds - (time.time() - started)) / (1.04 * rate)))
            print(f"{rate:.3f} s a step: {args.steps} steps", flush=True)
        if step == 20:
            synchronize(device)
            warm = time.time()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        loss = train_step(runner, model, optimizer, text.stream, generator, args)
        if step % args.log_every == 0 or step == args.steps - 1:
            model.eval()
            nats = heldout_loss(model, text.heldout, args.context, device)
            model.train()
            row = {
                "step": step,
                "tokens": (step + 1) * args.batch * args.context,
                "train_nats": round(loss.item(), 4),
                "heldout_nats": round(nats, 4),
                "heldout_bits_per_byte": text.bits_per_byte(nats),
                "seconds": round(time.time() - started, 1),
            }
            curve.append(row)
            print(json.dumps(row), flush=True)
    return curve


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Output(Protocol):
    """What the forward returns: logits (B, T, vocabulary)."""

    logits: Tensor


def train_step(
    runner: Callable[..., Output],
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    stream: Tensor,
    generator: torch.Generator,
    args: argparse.Namespace,
) -> Tensor:
    """One step on windows drawn from the stream; returns the loss. runner: the model, compiled on a GPU."""
    starts = torch.randint(0, len(stream) - args.context, (args.batch,), generator=generator, device=stream.device)
    ids = windows_at(stream, starts, args.context)
    with torch.autocast(stream.device.type, torch.bfloat16):
        logits = runner(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def write_model(
    model: PreTrainedModel,
    text: Prepared,
    curve: list[dict[str, float]],
    out: Path,
    args: argparse.Namespace,
    device: torch.device,
) -> None:
    """The packed weights, their config, and a record of the training."""
    parameters = sum(p.numel() for p in model.parameters())
    packed = pack(model)
    model.eval()
    nats = heldout_loss(model, text.heldout, args.context, device)
    save_file(packed, out / "packed.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["LlamaForCausalLM"]
    (out / "config.json").write_text(model.config.to_json_string())
    record = {
        "source": text.source.name,
        "source_sha256": hashlib.sha256(text.source.read_bytes()).hexdigest(),
        "documents": len(text.train_docs),
        "heldout_documents": [d.splitlines()[0] for d in text.heldout_docs],
        "train_tokens_unique": len(text.stream),
        "train_tokens_seen": args.steps * args.batch * args.context,
        "parameters": parameters,
        "heldout_nats_after_int8": round(nats, 4),
        "heldout_bits_per_byte_after_int8": text.bits_per_byte(nats),
        "settings": {k: v for k, v in vars(args).items() if k not in {"text", "output"}},
        "torch": torch.__version__,
        "curve": curve,
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "curve"}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--intermediate", type=int, default=640)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--budget-seconds", type=float, default=0, help="shorten the schedule to end in this time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
