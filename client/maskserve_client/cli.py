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
  3    unavailable, overloaded, cancelled or out of time: trying again may help
  4    the server's fault
  130  interrupted; the edit is cancelled on the server
  141  nobody reads the output
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
        description="Masked image edits: ask a maskserve worker or router, or serve a model.",
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
    _add_mask(subcommands)
    status = subcommands.add_parser("status", help="what a worker is doing")
    status.set_defaults(run=commands.status)
    cancel = subcommands.add_parser("cancel", help="withdraw edits by their request ids")
    cancel.add_argument("ids", nargs="+", metavar="ID", help="as given by edit --request-id")
    cancel.set_defaults(run=commands.cancel)
    drain = subcommands.add_parser("drain", help="have a worker take no new edits")
    drain.set_defaults(run=commands.drain)
    for command in (status, cancel, drain):
        _add_common(command)
    _add_templates(subcommands)
    _add_adapters(subcommands)
    add_jobs(subcommands, _add_common, _add_edit_options)
    add_workflows(subcommands, _add_common)
    _add_web(subcommands)
    _add_serve(subcommands)
    return top


def _add_mask(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    mask = subcommands.add_parser(
        "mask",
        help="find a thing in an image, and write its mask",
        description="Find a thing in an image by its name, or by clicks and a box, and write its "
        "mask. Of a router whose node servers find or segment.",
        epilog='example: maskserve mask --url localhost:8080 --image a.png --find "the car" '
        "--out m.png",
    )
    _add_common(mask)
    mask.add_argument(
        "--image", required=True, metavar="FILE", help="PNG, JPEG, WebP, AVIF, GIF or TIFF"
    )
    mask.add_argument("--out", required=True, metavar="FILE", help="where to write: a PNG")
    _add_mask_from(mask)
    mask.set_defaults(run=commands.mask)


def _add_mask_from(command: argparse._ActionsContainer) -> None:
    """Add the options that find a mask."""
    command.add_argument("--find", metavar="TEXT", help="in place of a mask: the thing's name")
    command.add_argument(
        "--click",
        action="append",
        metavar="X,Y[,0]",
        help="in place of a mask: a pixel of the thing, with 0 of what is none of it; may be given "
        "again",
    )
    command.add_argument(
        "--box", metavar="L,T,R,B", help="in place of a mask: a box round the thing"
    )


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url",
        default=os.environ.get("MASKSERVE_URL", ""),
        metavar="HOST:PORT",
        help="address of a router or worker: its HTTP or its gRPC port, with or without a scheme; "
        f"the other one is found (default: $MASKSERVE_URL, else {' or '.join(DEFAULTS)})",
    )
    command.add_argument(
        "--key",
        default=os.environ.get("MASKSERVE_KEY", ""),
        metavar="KEY",
        help="API key, where the router asks for one (default: $MASKSERVE_KEY, which other "
        "processes cannot read as they can a command line)",
    )
    command.add_argument(
        "--tls", action="store_true", help="speak TLS; the system's authorities are trusted"
    )
    command.add_argument(
        "--ca", metavar="FILE", help="PEM file of the authority to trust instead; implies --tls"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _add_edit(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    edit = subcommands.add_parser(
        "edit",
        help="repaint the masked part of an image",
        description="Repaint the masked part of an image. What the mask leaves out comes back "
        "bit for bit when --out is a .png or .webp.",
        epilog='example: maskserve edit --image a.png --mask m.png --prompt "a red star" '
        "--out b.png",
    )
    _add_common(edit)
    files, running = _add_edit_options(edit)
    files.add_argument(
        "--out", required=True, metavar="FILE", help="where to write: .png, .webp or .jpg"
    )
    files.add_argument(
        "--keep-result",
        action="store_true",
        default=None,
        help="keep the edited picture on the server for some time, as the next edit's "
        "--template-id; prints its id",
    )
    running.add_argument("--request-id", metavar="ID", help="name for cancel and logs")
    running.add_argument(
        "--timeout", type=float, metavar="S", help="give up waiting and cancel after so long"
    )
    running.add_argument(
        "--wait",
        type=float,
        metavar="S",
        help="wait so long for a server that is not ready yet",
    )
    running.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="follow the edit step by step (default: if stderr is a terminal)",
    )
    running.add_argument("--previews", metavar="DIR", help="write previews there; implies --stream")
    running.add_argument(
        "--preview-every", type=int, metavar="N", help="steps from preview to preview (default 4)"
    )
    edit.set_defaults(run=commands.edit)


def _add_edit_options(
    edit: argparse.ArgumentParser,
) -> tuple[argparse._ArgumentGroup, argparse._ArgumentGroup]:
    """Add an edit's options, for now or for a job; return the groups of pictures and of serving."""
    files = edit.add_argument_group("pictures")
    source = files.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--image", metavar="FILE", help="source image: PNG, JPEG, WebP, AVIF, GIF or TIFF"
    )
    source.add_argument(
        "--template-id", metavar="ID", help="a registered template or kept result instead"
    )
    files.add_argument(
        "--mask",
        metavar="FILE",
        help="mask of the same size: white edits; --expand alone needs none",
    )
    _add_mask_from(files)
    files.add_argument("--mask-mode", choices=MASK_MODES, help="what of the mask edits")
    files.add_argument("--dilate", dest="mask_dilate", type=int, metavar="PX", help="grow the mask")
    files.add_argument(
        "--feather", dest="mask_feather", type=int, metavar="PX", help="fade out beyond the mask"
    )
    files.add_argument(
        "--crop-to-mask",
        choices=CROP_MODES,
        help="whether the model sees a window round the mask alone, at the image's own sharpness "
        "(auto: of large images)",
    )
    files.add_argument(
        "--crop-padding",
        type=float,
        metavar="X",
        help="what the window has round the mask: below 1 a share of it, from 1 on pixels",
    )
    files.add_argument(
        "--expand",
        metavar="L,T,R,B",
        help="grow the image by so many pixels left, top, right, bottom; what is new is painted",
    )
    files.add_argument(
        "--background",
        choices=BACKGROUNDS,
        help="opaque: leave out the image's transparency, which .png and .webp keep",
    )
    files.add_argument(
        "--quality",
        dest="output_quality",
        type=int,
        metavar="N",
        help="of a .jpg (95 unless given) or .webp (lossless unless given), 0 to 100",
    )
    files.add_argument(
        "--ring",
        dest="mask_ring",
        type=int,
        metavar="TOKENS",
        help="compute so many tokens round the mask too; what is pasted stays the mask's",
    )

    model = edit.add_argument_group("what to paint", "Without an option the server's default.")
    model.add_argument("--prompt", required=True, metavar="TEXT", help="what to paint there")
    model.add_argument("--negative-prompt", metavar="TEXT", help="what to steer away from")
    model.add_argument("--seed", type=int, metavar="N", help="drawn and reported if not given")
    model.add_argument(
        "--steps", dest="num_inference_steps", type=int, metavar="N", help="denoising steps"
    )
    model.add_argument("--strength", type=float, metavar="X", help="share of the steps, (0, 1]")
    model.add_argument(
        "--guidance",
        dest="guidance_scale",
        type=float,
        metavar="X",
        help="how closely to follow the prompt; models that know no guidance refuse it",
    )
    model.add_argument(
        "--true-cfg",
        dest="true_cfg_scale",
        type=float,
        metavar="X",
        help="how strongly to steer away from the negative prompt; above 1 goes with it",
    )
    model.add_argument(
        "--model", metavar="NAME", help="a router chooses by it; a worker refuses any other"
    )

    model.add_argument(
        "--lora",
        action="append",
        metavar="NAME[:SCALE]",
        help="a LoRA that the server knows; may be given again, and the scale may be negative",
    )
    model.add_argument(
        "--control",
        action="append",
        metavar="NAME[:SCALE]=FILE",
        help="a ControlNet that the server knows, and its picture, as large as the image; may be "
        "given again",
    )

    running = edit.add_argument_group("how to serve it")
    running.add_argument(
        "--adapters",
        choices=ADAPTER_MODES,
        help="fast: the first steps may run before the LoRAs are there, and no step waits for what "
        "a ControlNet service says of it",
    )
    running.add_argument("--cache", choices=CACHE_MODES, help="use of cached activations")
    running.add_argument(
        "--reproducible",
        action="store_true",
        default=None,
        help="the same way through the cache at any load",
    )
    running.add_argument(
        "--first-block-threshold",
        type=float,
        metavar="X",
        help="leave a step's other blocks out where the first one changed less (FirstBlockCache)",
    )
    running.add_argument("--priority", type=int, metavar="N", help="higher runs first")
    running.add_argument("--deadline-ms", type=int, metavar="MS", help="due after so long")
    running.add_argument(
        "--on-late",
        choices=LATE_MODES,
        help="what becomes of an edit that is late (default: drop)",
    )
    running.add_argument(
        "--reuse",
        choices=REUSE_MODES,
        help="elastic: an edit that would be late may leave steps out, down to --reuse-floor",
    )
    running.add_argument(
        "--reuse-floor",
        type=float,
        metavar="DB",
        help="of --reuse elastic: PSNR in the mask that a way of doing so was measured at",
    )
    return files, running


def _add_templates(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    templates = subcommands.add_parser(
        "templates",
        help="source images that the server keeps",
        description="Source images that the server keeps, to be edited by their id. With "
        "http://HOST:PORT of a router they are listed as /v1/templates has them.",
    )
    actions = templates.add_subparsers(required=True, metavar="ACTION")
    add = actions.add_parser("add", help="register images; prints their ids")
    add.add_argument("images", nargs="+", metavar="FILE", help="PNG, JPEG, WebP, AVIF, GIF or TIFF")
    add.add_argument(
        "--shared", action="store_true", help="for every client, not only those with this API key"
    )
    add.set_defaults(run=commands.templates_add)
    listing = actions.add_parser("ls", help="list ids, and what the server keeps of each")
    listing.set_defaults(run=commands.templates_list)
    remove = actions.add_parser("rm", help="forget templates")
    remove.set_defaults(run=commands.templates_by_worker, op="evict")
    pin = actions.add_parser("pin", help="keep the cached activations of templates")
    pin.set_defaults(run=commands.templates_by_worker, op="pin")
    unpin = actions.add_parser("unpin", help="let cached activations be evicted again")
    unpin.set_defaults(run=commands.templates_by_worker, op="unpin")
    for command in (remove, pin, unpin):
        command.add_argument("ids", nargs="+", metavar="ID", help="as templates add prints it")
    for command in (add, listing, remove, pin, unpin):
        _add_common(command)


def _add_adapters(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    adapters = subcommands.add_parser(
        "adapters",
        help="LoRAs that edits may name",
        description="LoRAs that edits may name, in the server's storage and on its hosts.",
    )
    actions = adapters.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list them, and where each lies")
    listing.set_defaults(run=commands.adapters_list)
    check = actions.add_parser(
        "check",
        help="check adapters to their last weight, or files without a server",
        description="Check adapters of the server by their names, or .safetensors files here.",
    )
    check.add_argument("names", nargs="+", metavar="NAME|FILE", help="by name, or a file here")
    check.add_argument(
        "--model", metavar="DIR", help="of files: the folder of the model that they are for"
    )
    check.add_argument(
        "--gguf",
        default="",
        metavar="FILE",
        help="of files: GGUF file whose weights take the place of the model's transformer",
    )
    check.set_defaults(run=commands.adapters_check)
    load = actions.add_parser("load", help="bring them to the hosts' memory")
    pin = actions.add_parser("pin", help="load them, and keep them there")
    unpin = actions.add_parser("unpin", help="let them be evicted again")
    evict = actions.add_parser("evict", help="remove them from the hosts; the storage keeps them")
    for name, command in (("load", load), ("pin", pin), ("unpin", unpin), ("evict", evict)):
        command.add_argument("names", nargs="+", metavar="NAME", help="as adapters ls shows it")
        command.set_defaults(run=commands.adapters_by_worker, op=f"adapter_{name}")
    for command in (listing, check, load, pin, unpin, evict):
        _add_common(command)


def _add_web(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    web = subcommands.add_parser(
        "web",
        help="serve a page to paint masks on",
        description="Serve a page on which people paint a mask, say what is to be there, and watch "
        "the edit come. It asks a worker or router. Needs pip install -e '.[web]' in "
        "the checkout.",
    )
    web.add_argument("--host", default="127.0.0.1", help="address (default 127.0.0.1)")
    web.add_argument("--port", type=int, default=7860, help="port (default 7860)")
    web.add_argument(
        "--name",
        action="append",
        default=[],
        help="a name by which browsers reach the page, beside addresses, names without a dot and "
        "this machine's own; .example.com stands for all below it; may be given again",
    )
    web.add_argument("--images", metavar="DIR", help="pictures to begin with")
    web.add_argument(
        "--router",
        metavar="URL",
        help="HTTP address of a router whose node servers segment: a click masks a thing",
    )
    web.add_argument(
        "--edits", type=int, default=4, metavar="N", help="edits at a time, of all people (4)"
    )
    web.set_defaults(run=commands.web)
    _add_common(web)


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
