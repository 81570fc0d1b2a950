"""Whole runs of a mixture of experts: what generation recorded is trained on, and no byte of it stays behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tailrace.errors import SettingsError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.records import Completion, GenerationRequest, OnChunk, PayloadChunk
from tailrace.reporting.summary import read_summary
from tailrace.transport.payloads.accounts import PayloadAccounts
from tests.run.runs import ROOT, Command, command, environment, records, run_inline, tiny_settings
from tests.run.served import address_of, serving

QUICKSTART = ROOT / "src" / "tailrace" / "recipes" / "models" / "quickstart"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random mixture of experts that speaks the bundled model's tokens."""
    folder = tmp_path_factory.mktemp("experts")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(QUICKSTART / name, folder)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=1024,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=512,
        )
    ).save_pretrained(folder)
    return folder


def replaying(model: Path, *more: str) -> tuple[str, ...]:
    return (
        *("--model.name", str(model), "--generator.return_routed_experts", "true", "--max_steps", "3"),
        *("--trainer.router_replay", "on", "--restarts.retained_mb", "0", *more),  # nothing is kept beyond its step
    )


def require_replayed(folder: Path) -> None:
    """Every sampled token's experts were replayed, and what rollouts held was released."""
    lines = records(folder / "metrics.jsonl")
    assert len(lines) == 3
    assert all(line["training/replayed_share"] > 0.9 for line in lines)
    assert lines[0]["training/router_agreement"] > 0.999  # the others' routers may have learnt since
    recorded, released = (sum(line[f"payloads/{name}_bytes"] for line in lines) for name in ("recorded", "released"))
    assert recorded == released + lines[-1]["payloads/held_bytes"]
    assert released > 0


async def test_inline_the_trainer_replays_what_generation_chose(tmp_path: Path, model: Path) -> None:
    summary = await run_inline(tmp_path, *replaying(model))
    assert summary.exit_code == 0
    require_replayed(tmp_path / "run")


async def test_replies_cut_at_a_string_are_replayed_as_they_were_sampled(tmp_path: Path, model: Path) -> None:
    turns = ("--rollouts.max_turns", "2", "--rollouts.max_tokens", "24")
    summary = await run_inline(tmp_path, *replaying(model, *environment("stopping"), *turns))
    assert summary.exit_code == 0
    require_replayed(tmp_path / "run")
    assert sum(line.get("rollout/cut_tokens", 0) for line in records(tmp_path / "run" / "metrics.jsonl")) > 0


async def test_payloads_of_evaluations_end_with_their_rollouts_and_judges_make_none(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, held = list[GenerationRequest](), set[str]()
    generate, record, release = Generator.generate, PayloadAccounts.record, PayloadAccounts.release

    async def note_and_generate(generator: Generator, request: GenerationRequest, *more: OnChunk | None) -> Completion:
        asked.append(request)
        completion = await generate(generator, request, *more)
        assert (completion.routed_experts == ()) == (request.owner is None)
        return completion

    def note_and_record(accounts: PayloadAccounts, owner: str | None, chunks: tuple[PayloadChunk, ...]) -> None:
        if owner is not None:
            held.add(owner)
        record(accounts, owner, chunks)

    def note_and_release(accounts: PayloadAccounts, owner: str) -> None:
        held.discard(owner)
        release(accounts, owner)

    async def check_and_close(accounts: PayloadAccounts) -> None:
        assert all(owner.startswith("names-by-key/train") for owner in held)  # in flight as the run ended
        await close(accounts)

    close = PayloadAccounts.close
    monkeypatch.setattr(Generator, "generate", note_and_generate)
    monkeypatch.setattr(PayloadAccounts, "record", note_and_record)
    monkeypatch.setattr(PayloadAccounts, "release", note_and_release)
    monkeypatch.setattr(PayloadAccounts, "close", check_and_close)
    judged = ("--environment.name", "examples.own_judge:names_by_key", "--environment.judge.retries", "0")
    evaluated = ("--evaluation.every_steps", "1", "--evaluation.tasks", "4", "--scheduling.max_barren_batches", "2")
    await run_inline(tmp_path, *replaying(model, *judged, *evaluated))  # fails: a random model gives no scores
    owners = [request.owner for request in asked]
    assert None in owners
    assert any(owner.startswith("eval-0/") for owner in owners if owner is not None)


@pytest.mark.parametrize("payloads", ["reference", "value"])
def test_between_processes_payloads_travel_and_leave_nothing(tmp_path: Path, model: Path, payloads: str) -> None:
    with command(tmp_path, *replaying(model, "--transport.payloads", payloads)) as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    require_replayed(run.folder)
    assert not list(run.folder.glob("**/*.slab"))


@pytest.mark.long
def test_payloads_may_go_to_a_folder(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "payloads"
    with command(tmp_path, *replaying(model, "--transport.payload_folder", str(folder))) as run:
        run.wait_until(lambda: bool(list(folder.glob("*/*.slab"))))
        status, printed = run.wait()
        assert status == 0, printed
    require_replayed(run.folder)
    assert not list(folder.iterdir())


@pytest.mark.long
def test_what_a_killed_generator_put_is_trained_on_and_then_deleted(tmp_path: Path, model: Path) -> None:
    two = ("--generator.replicas", "2", "--generator.chunk_tokens", "4", "--rollouts.max_tokens", "48")
    with command(tmp_path, *replaying(model, *two), "--max_steps", "10000") as run:
        run.wait_until(lambda: bool(slabs(run, "generator-0.0")))  # before it serves its end would fail the run
        victim = run.role("generator-0")
        victim.kill()
        restarts = "generator/generator-0/restarts"
        run.wait_until(lambda: any(line.get(restarts) for line in records(run.folder / "metrics.jsonl")))
        run.wait_until(lambda: not slabs(run, "generator-0.0"))
        run.process.terminate()
        status, printed = run.wait()
        assert (status, run.leftovers(), psutil.pid_exists(victim.pid)) == (143, [], False), printed
    ledger = read_summary(run.folder).ledger
    assert ledger.balances
    assert ledger.by_state["failed"] == 0, printed
    assert "their recorded experts are gone" not in (run.folder / "logs" / "trainer.log").read_text()


def slabs(run: Command, writer: str) -> list[Path]:
    """Files of payloads in shared memory that one process made."""
    return [path for folder in run.leftovers() for path in folder.glob(f"{writer}-*.slab")]


def test_payloads_by_reference_are_refused_for_generators_of_other_hosts(model: Path) -> None:
    with pytest.raises(SettingsError, match=r"transport\.payloads"):
        tiny_settings(*replaying(model, "--generator.connect", "tcp://127.0.0.1:1"))


@pytest.mark.long
def test_a_generator_that_serves_alone_sends_what_it_recorded(tmp_path: Path, model: Path) -> None:
    recording = ("--generator.return_routed_experts", "true")
    with serving("--address", "tcp://127.0.0.1:0", *recording, model=str(model)) as server:
        connect = ("--generator.connect", address_of(server), "--transport.payloads", "value")
        with command(tmp_path, *replaying(model, *connect)) as run:
            status, printed = run.wait()
            assert (status, run.leftovers()) == (0, []), printed
    require_replayed(run.folder)
