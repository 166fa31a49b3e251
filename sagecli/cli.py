"""The `sage` command. Each command is short, and imports what is heavy inside."""

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sagecli.errors import RunStopped, UserError
from sagecli.interrupt import LEFT_BEHIND

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="Post-train text-to-video flow-matching models with SAGE-GRPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, e.g. sampler.eta=0.7.")
]


ProcessesOption = Annotated[
    int, typer.Option(min=1, help="Processes that share the work, one a GPU; over all machines.")
]


def main() -> None:
    """Run the command; what users can do something about is one sentence and an exit code, not a traceback."""
    code, sentence = _outcome()
    if "RANK" in os.environ:
        from sagecli import launch

        if launch.place() is not None:
            launch.leave(code, sentence)
    if sentence:
        _complain(sentence)
    if any(thread.name == LEFT_BEHIND for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _outcome() -> tuple[int, str]:
    """The exit code, and the sentence of what went wrong."""
    try:
        app()
    except SystemExit as end:
        return (end.code if isinstance(end.code, int) else int(end.code is not None)), ""
    except UserError as error:
        return 2, str(error)
    except RunStopped as error:
        return 1, str(error)
    except OSError as error:  # a folder that cannot be written, a full disk; without a file's name it is our bug
        if error.filename is None:
            raise
        return 2, f"{error.filename}: {error.strerror}"
    except RuntimeError as error:
        if "RANK" in os.environ:
            from sagecli import launch

            if launch.place() is not None and launch.lost_contact(error):
                return 1, launch.LOST
        raise
    return 0, ""


def _complain(text: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {_escaped(text)}", soft_wrap=True)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, quiet=os.environ.get("RANK", "0") != "0")


@app.command()
def presets(name: Annotated[str | None, typer.Argument(help="Print this preset's file.")] = None) -> None:
    """List the packaged presets, or print one."""
    from sagecli.loading import load_config, preset_names, preset_text

    if name is not None:
        print(preset_text(name), end="")
        return
    for preset in preset_names():
        print(f"{preset:<14} {load_config(preset).about}")


@app.command()
def inspect(
    what: Annotated[str, typer.Argument(help="table, std, gradients or quality.")] = "table",
    preset: Annotated[str, typer.Option(help="A preset's name or a .toml file.")] = "quickstart",
    set_: SetOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    figure: Annotated[list[Path] | None, typer.Option(help="Also draw them: .png, .svg, ...; may be repeated.")] = None,
) -> None:
    """Show the sampler's table (sigma, a, b, std, equalizer of every step), or what needs no training.

    std: every SDE's std of each step. gradients: of each step's log-probability, by autograd against the prediction.
    quality: the reward of SDE rollouts against ODE rollouts from the same noise.
    """
    from sagecli.inspection import inspect_run

    inspect_run(_console(), what, preset, set_ or [], json_, figure or [])


@app.command()
def train(
    preset: Annotated[str, typer.Option(help="A preset's name or a .toml file.")] = "quickstart",
    set_: SetOption = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; runs/PRESET-TIME by default.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN|CHECKPOINT", help="Continue this run exactly, or from its checkpoint.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="With --resume: config.toml may change this key.")
    ] = None,
    num_processes: ProcessesOption = 1,
    num_machines: Annotated[int, typer.Option(min=1, help="Machines that they run on; the same command on each.")] = 1,
    machine_rank: Annotated[int, typer.Option(min=0, help="Which of them this is.")] = 0,
    main_process_ip: Annotated[str | None, typer.Option(help="Address of machine 0.")] = None,
    main_process_port: Annotated[int | None, typer.Option(min=1, max=65535, help="A free port of machine 0.")] = None,
) -> None:
    """Train a model: rollouts, rewards, updates; evaluations and checkpoints on the way."""
    from sagecli import launch
    from sagecli.commands import check_processes, continue_training, start_training

    if (num_processes > 1 or num_machines > 1) and launch.place() is None:
        request = launch.Launch(num_processes, num_machines, machine_rank, main_process_ip, main_process_port)
        check_processes(preset, set_ or [], resume, num_processes)
        raise typer.Exit(launch.launch(request))
    if resume is None:
        if override:
            raise UserError("--override names what a resumed run may change; it goes with --resume")
        start_training(_console(), preset, set_ or [], run)
        return
    given = {"--set": set_, "--run": run, "--preset": None if preset == "quickstart" else preset}
    for option, value in given.items():
        if value is not None:
            raise UserError(f"--resume continues a run with its own configuration; leave out {option}")
    continue_training(_console(), resume, override or [])


@app.command()
def rollout(
    prompts: Annotated[Path, typer.Option(help="Prompt file: one a line, .jsonl or .csv.")],
    sde: Annotated[
        str | None, typer.Option(help="precise, dance, flow, cps, exact or ode; it acts in sampler.sde_steps.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A preset's name or a .toml file.")] = None,
    model: Annotated[str | None, typer.Option(help='Hub id, folder, or "tiny" for the embedded model.')] = None,
    adapter: Annotated[Path | None, typer.Option(help="Trained weights: a run or one of its checkpoints.")] = None,
    videos_per_prompt: Annotated[int, typer.Option(min=1, help="Videos of each prompt.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Where all noise comes from.")] = 0,
    reward: Annotated[list[str] | None, typer.Option(help="Score with this reward; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; rollouts/TIME by default.")] = None,
    set_: SetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what the output folder holds.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Make what the output folder lacks.")] = False,
    num_processes: ProcessesOption = 1,
) -> None:
    """Sample videos of a prompt file, with a manifest and a contact sheet a prompt."""
    from sagecli.commands import RolloutOutput, make_rollouts
    from sagecli.sampling import Request

    if force and resume:
        raise UserError("--force replaces the output folder and --resume completes it; choose one")
    from sagecli import launch

    if num_processes > 1 and launch.place() is None:
        raise typer.Exit(launch.launch(launch.Launch(num_processes)))
    request = Request(preset, model, adapter, sde, set_ or [])
    output = RolloutOutput(prompts, videos_per_prompt, seed, reward or [], out, force, resume)
    raise typer.Exit(make_rollouts(_console(), request, output))


@app.command()
def score(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="PATH", help="Videos, folders, patterns, manifest.jsonl.")
    ] = None,
    reward: Annotated[list[str] | None, typer.Option(help="Score with this reward; may be repeated.")] = None,
    path: Annotated[list[str] | None, typer.Option(metavar="[NAME=]DIR", help="Where a reward's weights are.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME.KEY=VALUE", help="A reward's option, e.g. clip.frames=4.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help=".csv or .jsonl with the columns video and prompt.")] = None,
    prompt: Annotated[str | None, typer.Option(help="One prompt for every video that has no other.")] = None,
    preset: Annotated[str | None, typer.Option(help="Take rewards and weights from this preset or .toml file.")] = None,
    weights: Annotated[str | None, typer.Option(help="Also show a weighted reward, e.g. VQ=0.5,MQ=0.5,TA=1.")] = None,
    pairs: Annotated[Path | None, typer.Option(help="Pairs that people compared: agreement with them.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write one row a video: .jsonl or .csv.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Videos of one size scored at once.")] = 4,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds a batch may take; the preset's, or 600.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Score what the output file lacks.")] = False,
) -> None:
    """Score video files with reward models; prompts come from a manifest, NAME.txt beside a video, or the options."""
    from sagecli.score import score_videos
    from sagecli.scorerequest import ScoreRequest

    if force and resume:
        raise UserError("--force replaces the output file and --resume completes it; choose one")
    if force and out is None:
        raise UserError("--force replaces an output file; name it with --out")
    request = ScoreRequest(
        paths or [],
        reward or [],
        preset,
        path or [],
        option or [],
        prompts,
        prompt,
        weights,
        pairs,
        out,
        force,
        resume,
        batch,
        timeout,
    )
    raise typer.Exit(score_videos(_console(), request))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run, or one of its checkpoints.")],
    format_: Annotated[
        str | None, typer.Option("--format", help="diffusers, peft, merged, tencent or comfyui.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; exports/RUN-FORMAT by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16, which the weights are stored in.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The checkpoint of this round, not the latest.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The moving average of the weights (optimizer.ema).")] = False,
    verify: Annotated[bool, typer.Option(help="Load what was written and compare.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Write trained weights in a format that other tools load, with a model card; checked before it is announced."""
    from sagecli.export import ExportRequest
    from sagecli.export import export as write_export

    console = _console()
    request = ExportRequest(source, format_, out, dtype, step, ema, verify, force)
    folder = write_export(request, lambda line: console.print(line, style="dim", soft_wrap=True))
    console.print(f"exported to {folder}; its README.md says how to load it", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the page; a single run's own by default.")] = None,
) -> None:
    """Write one page on runs: curves, videos before and after, settings; it works without a network."""
    from sagecli.report import report_runs

    _console().print(f"the page is {report_runs(runs, out)}", soft_wrap=True)


@app.command()
def ablate(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE.toml", help="A packaged grid, or one of your own.")],
    preset: Annotated[str, typer.Option(help="A preset's name or a .toml file.")] = "quickstart",
    set_: SetOption = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Training seeds a cell; the grid's own by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; ablations/NAME-PRESET by default.")] = None,
    num_processes: ProcessesOption = 1,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; one a GPU, or a core, by default.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cells and how long they would take.")] = False,
) -> None:
    """Train every cell of a grid and compare them: a table, figures and a page. The same command again goes on."""
    from sagecli.ablation.command import AblateRequest
    from sagecli.ablation.command import ablate as run_grid

    request = AblateRequest(name, preset, set_ or [], seeds, out, jobs, dry_run, num_processes)
    raise typer.Exit(run_grid(_console(), request))


if __name__ == "__main__":
    main()
