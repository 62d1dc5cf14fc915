"""The command `maskserve`: its arguments and exit codes; `commands` has the subcommands.

Exit codes: 0 done, 2 bad input, 3 unavailable or overloaded (a retry may help), 4 a fault of the
server, 130 interrupted, 141 the output was closed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial

from maskserve_client import commands
from maskserve_client.address import DEFAULTS
from maskserve_client.errors import ServerUnavailable
from maskserve_client.job_commands import add_jobs
from maskserve_client.workflows import add_workflows
from maskserve_common.contracts.settings import (
    ADAPTER_MODES,
    BACKGROUNDS,
    CACHE_MODES,
    CROP_MODES,
    LATE_MODES,
    MASK_MODES,
    REGION_MODES,
    REUSE_MODES,
)
from maskserve_common.errors import (
    AdapterNotFound,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    MaskserveError,
    Overloaded,
    Refused,
    TemplateNotFound,
)
from maskserve_serving import cli as serving

OK, BAD_INPUT, UNAVAILABLE, SERVER_FAULT, INTERRUPTED, UNREAD = 0, 2, 3, 4, 130, 141

_EPILOG = """\
exit codes:
  0    done
  2    bad input: the message names the field and what is accepted
  3    unavailable, overloaded, cancelled or timed out: a retry may help
  4    the server's fault
  130  interrupted; the edit is cancelled on the server
  141  the output was closed
"""


def exit_code(error: MaskserveError) -> int:
    """Return the exit code for an error."""
    if isinstance(error, InvalidRequest | TemplateNotFound | AdapterNotFound | Refused):
        return BAD_INPUT
    if isinstance(error, ServerUnavailable | Overloaded | DeadlineExceeded | Cancelled):
        return UNAVAILABLE
    return SERVER_FAULT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parser().parse_args(argv)
    # SIGTERM cancels the edit as Ctrl-C does.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = int(options.run(options) or OK)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `maskserve status | head`
        # Otherwise Python would report it once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except KeyboardInterrupt:
        print("maskserve: interrupted", file=sys.stderr)
        return INTERRUPTED
    except MaskserveError as error:
        print(f"maskserve: {error}", file=sys.stderr)
        return exit_code(error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"maskserve: {where}{error.strerror or error}", file=sys.stderr)
        return BAD_INPUT
    finally:
        signal.signal(signal.SIGTERM, previous)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="maskserve",
        description="Send image edits to a maskserve worker or router, or serve a model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "--version",
        action="version",
        version=f"maskserve {importlib.metadata.version('maskserve')}",
        help="show the version and exit",
    )
    subcommands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_edit(subcommands)
    _add_generate(subcommands)
    _add_mask(subcommands)
    status = subcommands.add_parser("status", help="show the state of a worker or router")
    status.set_defaults(run=commands.status)
    cancel = subcommands.add_parser("cancel", help="cancel edits by their request ids")
    cancel.add_argument("ids", nargs="+", metavar="ID", help="request id, as in edit --request-id")
    cancel.set_defaults(run=commands.cancel)
    drain = subcommands.add_parser("drain", help="tell a worker to accept no new edits")
    drain.set_defaults(run=commands.drain)
    for command in (status, cancel, drain):
        _add_common(command)
    _add_templates(subcommands)
    _add_adapters(subcommands)
    add_jobs(subcommands, _add_common, partial(_add_edit_options, needs_source=False))
    add_workflows(subcommands, _add_common)
    _add_web(subcommands)
    demo = subcommands.add_parser(
        "demo",
        help="edit a photograph by the demo model, beside diffusers",
        description="Run the demonstration of a checkout, as `make demo` does. Its model is not in "
        "the wheel.",
    )
    demo.set_defaults(run=commands.demo)
    _add_check(subcommands)
    _add_serve(subcommands)
    return top


def _add_mask(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    mask = subcommands.add_parser(
        "mask",
        help="find an object in an image and write its mask",
        description="Find an object in an image by its name, or by clicks and a box, and write its "
        "mask. It needs a router with node servers that find or segment objects.",
        epilog='example: maskserve mask --url localhost:8080 --image a.png --find "the car" '
        "--out m.png",
    )
    _add_common(mask)
    mask.add_argument(
        "--image", required=True, metavar="FILE", help="PNG, JPEG, WebP, AVIF, GIF or TIFF"
    )
    mask.add_argument("--out", required=True, metavar="FILE", help="PNG file to write")
    _add_mask_from(mask)
    mask.set_defaults(run=commands.mask)


def _add_mask_from(command: argparse._ActionsContainer) -> None:
    """Add the options that find a mask."""
    command.add_argument("--find", metavar="TEXT", help="instead of a mask: the object's name")
    command.add_argument(
        "--click",
        action="append",
        metavar="X,Y[,0]",
        help="instead of a mask: a pixel of the object, or with ,0 a pixel outside of it; may be "
        "repeated",
    )
    command.add_argument(
        "--box", metavar="L,T,R,B", help="instead of a mask: a box around the object"
    )


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url",
        default=os.environ.get("MASKSERVE_URL", ""),
        metavar="HOST:PORT",
        help="address of a router or worker: its HTTP or gRPC port, with or without a scheme; the "
        f"client finds the other port (default: $MASKSERVE_URL, else {' or '.join(DEFAULTS)})",
    )
    command.add_argument(
        "--key",
        default=os.environ.get("MASKSERVE_KEY", ""),
        metavar="KEY",
        help="API key, if the router asks for one (default: $MASKSERVE_KEY; unlike a command line, "
        "other processes cannot read it)",
    )
    command.add_argument(
        "--tls", action="store_true", help="use TLS and trust the system's certificate authorities"
    )
    command.add_argument(
        "--ca",
        metavar="FILE",
        help="PEM file of the certificate authority to trust instead; implies --tls",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _add_edit(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    edit = subcommands.add_parser(
        "edit",
        help="repaint the masked part of an image, or edit all of it",
        description="Repaint the masked part of an image. Pixels outside the mask stay the same, "
        "bit for bit, if --out is a .png or .webp. Without --mask the whole image is edited, by "
        "models that edit by instruction, or with --strength below 1.",
        epilog='example: maskserve edit --image a.png --mask m.png --prompt "a red star" '
        "--out b.png",
    )
    _add_common(edit)
    files, running = _add_edit_options(edit)
    _add_answer_options(files, running)
    edit.set_defaults(run=commands.edit)


def _add_generate(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    generate = subcommands.add_parser(
        "generate",
        help="make an image from a prompt alone",
        description="Make an image from a prompt alone, by models that have a text-to-image "
        "pipeline.",
        epilog='example: maskserve generate --prompt "a red star" --size 1024x768 --out b.png',
    )
    _add_common(generate)
    files = generate.add_argument_group("picture")
    _add_size(files, "size of the picture (auto: the model's native square)")
    _add_file_options(files)
    _add_model_options(generate)
    running = _add_running_options(generate)
    _add_answer_options(files, running)
    generate.set_defaults(
        run=commands.edit,
        image=None,
        reference=None,
        mask=None,
        expand=None,
        find=None,
        click=None,
        box=None,
    )


def _add_size(files: argparse._ArgumentGroup, text: str) -> None:
    files.add_argument("--size", metavar="auto|WxH", help=text)


def _add_answer_options(files: argparse._ArgumentGroup, running: argparse._ArgumentGroup) -> None:
    """Add the options of an edit whose answer a client waits for."""
    files.add_argument(
        "--out", required=True, metavar="FILE", help="file to write: .png, .webp or .jpg"
    )
    files.add_argument(
        "--keep-result",
        action="store_true",
        default=None,
        help="keep the picture on the server for some time and print its id, for the next edit's "
        "--template-id",
    )
    running.add_argument("--request-id", metavar="ID", help="name of the edit, for cancel and logs")
    running.add_argument(
        "--timeout", type=float, metavar="S", help="cancel the edit after this many seconds"
    )
    running.add_argument(
        "--wait",
        type=float,
        metavar="S",
        help="wait up to this many seconds until the server is ready",
    )
    running.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="follow the edit step by step (default: if stderr is a terminal)",
    )
    running.add_argument(
        "--previews", metavar="DIR", help="write previews to this folder; implies --stream"
    )
    running.add_argument(
        "--preview-every", type=int, metavar="N", help="steps between two previews (default 4)"
    )


def _add_edit_options(
    edit: argparse.ArgumentParser, *, needs_source: bool = True
) -> tuple[argparse._ArgumentGroup, argparse._ArgumentGroup]:
    """Add an edit's options, for now or for a job; return the groups of pictures and of serving."""
    files = edit.add_argument_group("pictures")
    source = files.add_mutually_exclusive_group(required=needs_source)
    source.add_argument(
        "--image", metavar="FILE", help="source image: PNG, JPEG, WebP, AVIF, GIF or TIFF"
    )
    source.add_argument(
        "--template-id",
        metavar="ID",
        help="a registered template or a kept result, instead of --image",
    )
    files.add_argument(
        "--reference",
        action="append",
        metavar="FILE",
        help="picture that the model sees beside the image; may be repeated, up to the model's "
        "number",
    )
    files.add_argument(
        "--reference-id",
        action="append",
        dest="reference_ids",
        metavar="ID",
        help="a registered template or a kept result that follows the references; may be repeated",
    )
    files.add_argument(
        "--mask",
        metavar="FILE",
        help="mask of the image's size: white pixels are edited; without it or --expand, all are",
    )
    _add_mask_from(files)
    files.add_argument("--mask-mode", choices=MASK_MODES, help="how to read the mask")
    files.add_argument("--dilate", dest="mask_dilate", type=int, metavar="PX", help="grow the mask")
    files.add_argument(
        "--feather", dest="mask_feather", type=int, metavar="PX", help="fade out beyond the mask"
    )
    files.add_argument(
        "--crop-to-mask",
        choices=CROP_MODES,
        help="whether the model sees only a window around the mask, as sharp as the image "
        "(auto: for large images)",
    )
    files.add_argument(
        "--crop-padding",
        type=float,
        metavar="X",
        help="margin of the window around the mask: below 1 a share of the mask's longer side, "
        "from 1 on pixels",
    )
    files.add_argument(
        "--expand",
        metavar="L,T,R,B",
        help="grow the image by this many pixels left, top, right, bottom; the new area is painted",
    )
    _add_size(
        files, "without a mask, the size of the picture (auto: as the model's pipeline has it)"
    )
    _add_file_options(files)
    files.add_argument(
        "--ring",
        dest="mask_ring",
        type=int,
        metavar="TOKENS",
        help="also compute this many tokens around the mask; they are not pasted",
    )
    files.add_argument(
        "--region",
        choices=REGION_MODES,
        help="auto: without a mask, compute mostly the tokens that the edit changes",
    )
    model = _add_model_options(edit)
    model.add_argument(
        "--strength", type=float, metavar="X", help="share of the steps to run, (0, 1]"
    )
    return files, _add_running_options(edit)


def _add_file_options(files: argparse._ArgumentGroup) -> None:
    """Add options of the answer's file."""
    files.add_argument(
        "--background",
        choices=BACKGROUNDS,
        help="opaque: drop the picture's transparency, which .png and .webp otherwise keep",
    )
    files.add_argument(
        "--quality",
        dest="output_quality",
        type=int,
        metavar="N",
        help="quality of a .jpg (default 95) or .webp (default lossless), 0 to 100",
    )


def _add_model_options(edit: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add options of the model's run."""
    model = edit.add_argument_group(
        "what to paint", "The server's defaults apply to missing options."
    )
    model.add_argument("--prompt", required=True, metavar="TEXT", help="what to paint")
    model.add_argument("--negative-prompt", metavar="TEXT", help="what the picture should not show")
    model.add_argument("--seed", type=int, metavar="N", help="seed (default: drawn and reported)")
    model.add_argument(
        "--steps", dest="num_inference_steps", type=int, metavar="N", help="denoising steps"
    )
    model.add_argument(
        "--guidance",
        dest="guidance_scale",
        type=float,
        metavar="X",
        help="how closely to follow the prompt; models without guidance refuse it",
    )
    model.add_argument(
        "--true-cfg",
        dest="true_cfg_scale",
        type=float,
        metavar="X",
        help="how strongly to avoid the negative prompt; a value above 1 needs one",
    )
    model.add_argument(
        "--model",
        metavar="NAME",
        help="model: a router chooses a worker by it; a worker accepts only its own",
    )

    model.add_argument(
        "--lora",
        action="append",
        metavar="NAME[:SCALE]",
        help="name of a LoRA on the server; the scale may be negative; may be repeated",
    )
    model.add_argument(
        "--ip-adapter",
        metavar="NAME[:SCALE]=FILE",
        help="name of an IP-Adapter on the server, and the picture that it reads",
    )
    model.add_argument(
        "--control",
        action="append",
        metavar="NAME[:SCALE]=FILE",
        help="name of a ControlNet on the server, and its picture, of the image's size; may be "
        "repeated",
    )
    return model


def _add_running_options(edit: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add options of scheduling and of computation that is left out."""
    running = edit.add_argument_group("how to serve it")
    running.add_argument(
        "--adapters",
        choices=ADAPTER_MODES,
        help="fast: the first steps may run without the LoRAs, and a step may use a ControlNet "
        "service's output from an earlier step",
    )
    running.add_argument("--cache", choices=CACHE_MODES, help="use of cached activations")
    running.add_argument(
        "--reproducible",
        action="store_true",
        default=None,
        help="equal requests give equal pixels at any load",
    )
    running.add_argument(
        "--step-interval",
        type=int,
        metavar="N",
        help="run the model in one of N steps; a line through its last answers gives the others",
    )
    running.add_argument(
        "--priority", type=int, metavar="N", help="edits with a higher one run first"
    )
    running.add_argument(
        "--deadline-ms", type=int, metavar="MS", help="time until the response is due"
    )
    running.add_argument(
        "--on-late",
        choices=LATE_MODES,
        help="drop: a late edit ends with an error; finish: it goes on (default: drop)",
    )
    running.add_argument(
        "--reuse",
        choices=REUSE_MODES,
        help="elastic: an edit that would be late may skip work, down to --reuse-floor",
    )
    running.add_argument(
        "--reuse-floor",
        type=float,
        metavar="DB",
        help="dB in the mask against a dense edit: the edit refreshes by the errors that it "
        "measures; with --reuse elastic the lowest measured quality",
    )
    return running


def _add_templates(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    templates = subcommands.add_parser(
        "templates",
        help="register, list and pin source images",
        description="Manage the source images that the server keeps. Edits name them by id. With a "
        "router's http://HOST:PORT, the commands use its /v1/templates.",
    )
    actions = templates.add_subparsers(required=True, metavar="ACTION")
    add = actions.add_parser("add", help="register images and print their ids")
    add.add_argument("images", nargs="+", metavar="FILE", help="PNG, JPEG, WebP, AVIF, GIF or TIFF")
    add.add_argument(
        "--shared",
        action="store_true",
        help="every client may use them, not only clients with this API key",
    )
    add.set_defaults(run=commands.templates_add)
    listing = actions.add_parser("ls", help="list ids and cached activations")
    listing.set_defaults(run=commands.templates_list)
    remove = actions.add_parser("rm", help="delete templates")
    remove.set_defaults(run=commands.templates_change, op="evict")
    pin = actions.add_parser(
        "pin", help="protect the cached activations of templates from eviction"
    )
    pin.set_defaults(run=commands.templates_change, op="pin")
    unpin = actions.add_parser("unpin", help="allow the eviction of cached activations again")
    unpin.set_defaults(run=commands.templates_change, op="unpin")
    for command in (remove, pin, unpin):
        command.add_argument(
            "ids", nargs="+", metavar="ID", help="template id, as printed by templates add"
        )
    for command in (add, listing, remove, pin, unpin):
        _add_common(command)


def _add_adapters(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    adapters = subcommands.add_parser(
        "adapters",
        help="list, check and load LoRAs",
        description="Manage the LoRAs in the server's storage and on its hosts.",
    )
    actions = adapters.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list LoRAs and ControlNets, and where they are loaded")
    listing.set_defaults(run=commands.adapters_list)
    check = actions.add_parser(
        "check",
        help="check every weight of LoRAs on the server, or of files",
        description="Check LoRAs of the server by name, or local .safetensors files without one.",
    )
    check.add_argument(
        "names", nargs="+", metavar="NAME|FILE", help="name on the server, or a local file"
    )
    check.add_argument(
        "--model", metavar="DIR", help="for files: folder of the model that they belong to"
    )
    check.add_argument(
        "--gguf",
        default="",
        metavar="FILE",
        help="for files: GGUF file whose weights replace the model's transformer",
    )
    check.set_defaults(run=commands.adapters_check)
    load = actions.add_parser("load", help="load LoRAs into the hosts' memory")
    pin = actions.add_parser("pin", help="load LoRAs and protect them from eviction")
    unpin = actions.add_parser("unpin", help="allow the eviction of LoRAs again")
    evict = actions.add_parser("evict", help="remove LoRAs from the hosts; the storage keeps them")
    for name, command in (("load", load), ("pin", pin), ("unpin", unpin), ("evict", evict)):
        command.add_argument(
            "names", nargs="+", metavar="NAME", help="name, as printed by adapters ls"
        )
        command.set_defaults(run=commands.adapters_change, op=f"adapter_{name}")
    for command in (listing, check, load, pin, unpin, evict):
        _add_common(command)


def _add_web(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    web = subcommands.add_parser(
        "web",
        help="serve a web page for masked edits",
        description="Serve a web page on which people paint a mask, write a prompt and watch the "
        "edit. The page sends edits to a worker or router. It needs pip install -e '.[web]' in "
        "the checkout.",
    )
    web.add_argument("--host", default="127.0.0.1", help="address (default 127.0.0.1)")
    web.add_argument("--port", type=int, default=7860, help="port (default 7860)")
    web.add_argument(
        "--name",
        action="append",
        default=[],
        help="host name under which browsers reach the page; .example.com includes its subdomains; "
        "may be repeated. Addresses, names without a dot and this machine's own always work",
    )
    web.add_argument("--images", metavar="DIR", help="folder of pictures that the page offers")
    web.add_argument(
        "--router",
        metavar="URL",
        help="HTTP address of a router with segmenting node servers: a click masks an object",
    )
    web.add_argument(
        "--edits",
        type=int,
        default=4,
        metavar="N",
        help="most edits at a time, of all users together (default 4)",
    )
    web.set_defaults(run=commands.web)
    _add_common(web)


def _add_check(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = subcommands.add_parser(
        "check",
        help="say what a model, a checkpoint file or an adapter is, and what it needs",
        description=serving.CHECK_DESCRIPTION,
        epilog=serving.CHECK_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serving.add_check_arguments(check)
    check.set_defaults(run=serving.check)


def _add_serve(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = subcommands.add_parser(
        "serve",
        help="serve a model on this host",
        description=serving.DESCRIPTION,
        epilog=serving.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serving.add_arguments(serve)
    serve.set_defaults(run=serving.serve)


if __name__ == "__main__":
    sys.exit(main())
