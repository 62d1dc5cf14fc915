"""Change single lines of the product to wrong ones, and check that a test fails for each.

Each mutation is made in a copy of the tree, where its test must pass before and fail after.
A mutation that its test survives means that the test asserts too little; one whose line is not in
its file any more, or whose test cannot run, is an error of this table.

    scripts/bench mutants                 all of them
    scripts/bench mutants ring paste      those whose name or file has one of these words
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maskserve_benchmarks.checkout import CHECKOUT

Verdict = Literal["killed", "survived", "broken"]

_COPIED = ("engine", "router", "client", "serving", "benchmarks", "studies", "scripts", "tests")
_PASSED, _FAILED = 0, 1
"""Exit codes of pytest; any other code means that no test was judged."""
_TOO_LONG = "took too long"
_PATIENCE_S = 120.0
"""A test that hangs under a mutation has detected it."""


@dataclass(frozen=True)
class Mutation:
    """A line of the product, and a wrong version of it."""

    name: str
    file: str
    line: str
    """The source text within one line; it occurs once in its file."""
    wrong: str
    test: str
    """The node id of the test that must fail in a case that is not slow. If it names a case, that
    case alone runs."""


_ENGINE, _UNIT = "engine/maskserve_engine", "tests/unit"
_WAY = f"{_UNIT}/engine/cache/test_cached_edits.py"
_KEPT = f"{_UNIT}/engine/batch/test_step_cache.py"
_REFRESH = f"{_UNIT}/engine/families/flux/test_flux_refresh.py"
_SLOTS = f"{_UNIT}/engine/control_link/test_free_slots.py"
_LOST = f"{_UNIT}/engine/control_link/test_lost_service.py"
_FAST = f"{_UNIT}/engine/control_link/test_fast_controls.py"
_SEVERAL = f"{_UNIT}/engine/control_link/test_several_services.py"
_SAMPLERS = f"{_UNIT}/engine/families/unet/test_unet_samplers.py"
_FLOW, _FLUX2 = (
    "engine/maskserve_engine/families/mmdit",
    "engine/maskserve_engine/families/flux2/adapter.py",
)
_CONTRACT = f"{_UNIT}/engine/families/test_family_contract.py"
_DENSE = f"{_CONTRACT}::test_dense_rows_of_any_mix_are_the_pipelines"
_WHOLE = f"{_CONTRACT}::test_whole_edits_and_generations_of_any_mix_are_the_pipelines"
_KLEIN = f"{_UNIT}/engine/families/flux2/test_flux2.py"
_QWEN = f"{_UNIT}/engine/families/qwen_image/test_qwen_image.py"
_NETS = f"{_UNIT}/engine/families/mmdit/test_flow_control.py"
_QWEN_EDIT = f"{_UNIT}/engine/families/qwen_image/test_qwen_edit.py"
_QWEN21 = "engine/maskserve_engine/families/qwen_image21/adapter.py"
_OF_QWEN21 = f"{_UNIT}/engine/families/qwen_image21/test_qwen_image21.py"
_Z_IMAGE = "engine/maskserve_engine/families/z_image/adapter.py"
_OF_Z_IMAGE = f"{_UNIT}/engine/families/z_image/test_z_image.py"
_FOUR = f"{_KLEIN}::test_a_distilled_model_has_an_anchor_for_each_of_its_four_steps"
_EXACT = f"{_UNIT}/engine/families/mmdit/test_exact_references.py"
_HOST_ROWS = f"{_UNIT}/engine/requests/test_refresh_steps.py"
_SERVICES = "engine/maskserve_engine/control_link/services.py"
_STAGES = "tests/triton/test_stages.py"
_QUEUE = f"{_UNIT}/common/test_fair_queue.py"
_NODE_FILES, _OF_NODE_FILES = (
    "engine/maskserve_workflows/node_files.py",
    f"{_UNIT}/workflows/test_node_files.py",
)
_KEPT_ANSWERS, _BY_NAME = (
    "router/maskserve_router/nodes/kept_answers.py",
    f"{_UNIT}/router/test_values_by_name.py",
)
_RUNS = f"{_UNIT}/router/test_workflows.py"
_LIGHT = "tests/contract/test_light_router.py"
_CONTROL = f"{_UNIT}/engine/planning/test_refresh_control.py"
_PLANNER = f"{_UNIT}/engine/planning/test_planner.py"
_PLANS = f"{_UNIT}/engine/planning/test_plan_cache.py"
_NODES = f"{_UNIT}/workflows/test_scheduling.py"

MUTATIONS = (
    # Which entry a row reads
    Mutation(
        "shared loads ignore the template",
        "engine/maskserve_engine/cache/store.py",
        'name = (key, anchor, b"" if whole else selection.digest)',
        'name = ("", anchor, b"" if whole else selection.digest)',
        f"{_WAY}::test_two_templates_with_one_mask_at_once_give_the_pixels_of_lone_runs",
    ),
    Mutation(
        "entries one anchor late",
        "engine/maskserve_engine/requests/templates.py",
        "else nearest_anchor(anchors, sigma, timestep, reach)",
        "else nearest_anchor(anchors[1:], sigma, timestep, reach)",
        f"{_WAY}::test_each_step_reads_what_its_own_template_was_at_the_nearest_anchor",
    ),
    Mutation(
        "entries one step late",
        "engine/maskserve_engine/cache/reader.py",
        "        anchor = self.anchors[step]",
        "        anchor = self.anchors[max(0, step - 1)]",
        f"{_WAY}::test_each_step_reads_what_its_own_template_was_at_the_nearest_anchor",
    ),
    Mutation(
        "an anchor of any distance is near enough",
        "engine/maskserve_common/contracts/keys.py",
        "if distance <= tolerance and (",
        "if distance <= 1.0 and (",
        f"{_UNIT}/engine/cache/test_cache.py::test_the_nearest_anchor_within_tolerance",
    ),
    # Names and contents of entries
    Mutation(
        "the key does not say the model's revision",
        "engine/maskserve_engine/requests/templates.py",
        "model_revision=self.model_revision,",
        'model_revision="",',
        f"{_WAY}::test_a_key_changes_with_all_that_entries_depend_on_and_with_nothing_else",
    ),
    Mutation(
        "the template's noise is the edit's own",
        "engine/maskserve_engine/requests/templates.py",
        "noise_seed=job.request.template_noise_seed,",
        "noise_seed=job.request.seed,",
        f"{_WAY}::test_a_key_changes_with_all_that_entries_depend_on_and_with_nothing_else",
    ),
    Mutation(
        "all templates have one noise",
        "engine/maskserve_engine/stages/latents.py",
        'return draw(shape, torch.Generator("cpu").manual_seed(seed), dtype)',
        'return draw(shape, torch.Generator("cpu").manual_seed(0), dtype)',
        f"{_UNIT}/engine/families/test_outside_noise.py::test_a_flux_row_equals_the_pipeline_given_its_noise",
    ),
    Mutation(
        "int4 floors",
        "engine/maskserve_engine/cache/entries.py",
        "steps = (grouped / groups.float()[:, :, None]).round_()",
        "steps = (grouped / groups.float()[:, :, None]).floor_()",
        f"{_WAY}::test_int4_is_off_by_half_a_step_at_most_and_by_nothing_in_the_mean",
    ),
    Mutation(
        "a file's checksum is not looked at",
        "engine/maskserve_engine/cache/entry_file.py",
        "    digest = xxhash.xxh3_128()",
        '    return metadata.get("digest", "")',
        f"{_UNIT}/engine/cache/test_store.py::test_a_damaged_file_is_dropped_counted_and_never_read",
    ),
    # What a row keeps from its refresh steps
    Mutation(
        "an anchor that is told twice makes a line",
        "engine/maskserve_engine/batch/step_cache.py",
        "elif self._line.sigmas[-1:] != (sigma,):",
        "elif True:",
        f"{_KEPT}::test_a_step_that_is_tried_again_leaves_what_it_left_first",
    ),
    Mutation(
        "a step that is tried again is kept anew",
        "engine/maskserve_engine/batch/step_cache.py",
        "if self._lost == self._step or (previous is not None and previous.step == self._step):",
        "if self._lost == self._step:",
        f"{_KEPT}::test_a_step_that_is_tried_again_leaves_what_it_left_first",
    ),
    Mutation(
        "an anchor without memory counts as whole",
        "engine/maskserve_engine/batch/step_cache.py",
        "if self._lost == self._step:",
        "if False:",
        f"{_KEPT}::test_an_anchor_without_memory_is_none_and_a_later_one_begins_anew",
    ),
    Mutation(
        "residual corrections take no bytes",
        "engine/maskserve_engine/batch/step_cache.py",
        "return self._refreshed.nbytes + self.correction.parts.nbytes",
        "return self._refreshed.nbytes",
        f"{_KEPT}::test_residual_corrections_are_counted_among_its_bytes",
    ),
    Mutation(
        "what anchors leave goes on the other way",
        "engine/maskserve_engine/batch/step_cache.py",
        "return (last - current) / (earlier - last) if earlier != last else 0.0",
        "return (current - last) / (earlier - last) if earlier != last else 0.0",
        f"{_CONTRACT}::test_steps_between_refresh_steps_lie_on_their_lines[sd3-large]",
    ),
    Mutation(
        "what anchors leave stays as the last one left it",
        "engine/maskserve_engine/batch/step_cache.py",
        "return (last - current) / (earlier - last) if earlier != last else 0.0",
        "return 0.0",
        f"{_CONTRACT}::test_steps_between_refresh_steps_lie_on_their_lines[sd3-large]",
    ),
    Mutation(
        "what anchors leave lies on a line over sigma itself",
        "engine/maskserve_engine/batch/step_cache.py",
        "earlier, last, current = (value**power for value in (*sigmas, sigma))",
        "earlier, last, current = (*sigmas, sigma)",
        f"{_CONTRACT}::test_steps_between_refresh_steps_lie_on_their_lines[sd3-large]",
    ),
    Mutation(
        "LoRAs of joined layers change the first of them",
        f"{_FLOW}/weights.py",
        "places[name] = Place(product, widths * width, layer_shape(module))",
        "places[name] = Place(product, 0, layer_shape(module))",
        f"{_CONTRACT}::test_loras_are_those_that_diffusers_loads[chroma]",
    ),
    Mutation(
        "nets beside a template look ahead in no edit of few steps",
        "engine/maskserve_engine/planning/refresh_steps.py",
        "max(refresh_count(steps, stride), 2 if steps > 2 else 1)",
        "max(refresh_count(steps, stride), 1)",
        f"{_UNIT}/engine/planning/test_refresh_schedule.py"
        "::test_an_edit_with_controls_looks_ahead_once_at_least",
    ),
    Mutation(
        "the stretch behind the last refresh step may be as long as one between two",
        "engine/maskserve_engine/planning/refresh_control.py",
        "if step == last or _LAST * rest <= reach:",
        "if step == last or rest <= reach:",
        f"{_UNIT}/engine/planning/test_refresh_control.py"
        "::test_the_next_refresh_step_lies_within_the_distance_that_the_error_allows",
    ),
    Mutation(
        "a lookahead is computed before the error that places it is known",
        f"{_FLOW}/rows.py",
        "if schedule.control is not None and self.step in schedule.refresh_steps:",
        "if plan.control is not None and self.step < 0:",
        f"{_UNIT}/engine/requests/test_controlled_refreshes.py"
        "::test_its_errors_place_an_edits_refresh_steps",
    ),
    Mutation(
        "what anchors leave bends less than three of them show",
        "engine/maskserve_engine/layers/keep_tokens.py",
        "bends.append(encode(missed.div_(1.0 + reach), format))",
        "bends.append(encode(missed.div_(2.0 + reach), format))",
        f"{_REFRESH}::test_it_is_the_pipeline_whose_other_tokens_are_foretold",
    ),
    Mutation(
        "tokens left out go twice the way to an anchor that is foreseen",
        f"{_FLOW}/spans.py",
        "self.latents, self.times = self.latents_now, (0.0, 0.0)",
        "self.latents = self.latents_now",
        f"{_KEPT}::test_tokens_left_out_go_on_by_the_velocity_that_anchors_foretell",
    ),
    Mutation(
        "what is shown of a source is booked twice",
        "engine/maskserve_engine/requests/refresh_schedules.py",
        '+ (len(text["prompt_embeds"]) - picture_tokens) * schedule.text',
        '+ len(text["prompt_embeds"]) * schedule.text',
        f"{_CONTRACT}::test_refresh_steps_are_dense_steps[qwen-image-edit]",
    ),
    Mutation(
        "a line is booked for one anchor",
        "engine/maskserve_engine/requests/refresh_schedules.py",
        "changes = min(len(schedule.refresh_steps) - 1, 1 + schedule.second_order)",
        "changes = min(len(schedule.refresh_steps), 1 + schedule.second_order)",
        f"{_REFRESH}::test_what_is_booked_is_what_is_kept",
    ),
    Mutation(
        "a ring beside a template is not booked",
        "engine/maskserve_engine/requests/refresh_schedules.py",
        "ring = schedule.ring * tokens.ring",
        "ring = 0 * tokens.ring",
        f"{_REFRESH}::test_what_is_booked_beside_a_template_is_what_is_kept",
    ),
    Mutation(
        "devices that share steps keep text beside a template",
        "engine/maskserve_engine/requests/refresh_schedules.py",
        "if self._shares_steps:",
        "if False:",
        f"{_UNIT}/engine/requests/test_refresh_steps.py"
        "::test_where_devices_share_steps_an_edit_keeps_nothing_beside_a_template",
    ),
    Mutation(
        "a preview shows a noisy ring",
        f"{_FLOW}/rows.py",
        "return self.image.whole(self._clean_estimate(), ended=False)",
        "return self.image.whole(self._clean_estimate(), ended=True)",
        f"{_REFRESH}::test_what_is_shown_of_a_row_on_its_way_has_the_source_outside_the_mask",
    ),
    Mutation(
        "a row's last step leads on",
        f"{_FLOW}/rows.py",
        "if self.sampler.moved is None or next_step >= self.steps:",
        "if self.sampler.moved is None or next_step > self.steps:",
        f"{_REFRESH}::test_what_a_step_ahead_is_asked_with_is_where_the_last_answer_leads",
    ),
    Mutation(
        "a turn of priming that is paid for waits a step",
        "engine/maskserve_engine/scheduling/step_scheduler.py",
        "or self._credit < self._turn_price():",
        "or self._credit <= self._turn_price():",
        f"{_UNIT}/engine/scheduling/test_step_scheduler.py"
        "::test_priming_takes_its_turn_as_soon_as_it_is_paid_for",
    ),
    Mutation(
        "a key with small bursts gets ahead without a bound",
        "engine/maskserve_engine/scheduling/step_scheduler.py",
        "(received[key] > limit, bursts[key], received[key])",
        "(bursts[key], received[key])",
        f"{_UNIT}/engine/scheduling/test_key_shares.py"
        "::test_pauses_between_small_edits_win_no_more_than_an_equal_part",
    ),
    Mutation(
        "the work of a key's burst does not count",
        "engine/maskserve_engine/scheduling/step_scheduler.py",
        "(received[key] > limit, bursts[key], received[key])",
        "(received[key] > limit, received[key])",
        f"{_UNIT}/engine/scheduling/test_key_shares.py"
        "::test_a_small_edit_does_not_wait_for_the_bursts_of_four_keys",
    ),
    # Residuals: where they are stored, and who announces them
    Mutation(
        "a session of a service that has ended is used on",
        "engine/maskserve_engine/control_link/services.py",
        "if link is not None and not link.over:",
        "if link is not None:",
        f"{_LOST}::test_a_session_is_shared_while_its_service_lives_and_anew_behind_another",
    ),
    Mutation(
        "each ControlNet has a session of its own",
        "engine/maskserve_engine/control_link/services.py",
        "if link is not None and not link.over:",
        "if False:",
        f"{_LOST}::test_a_session_is_shared_while_its_service_lives_and_anew_behind_another",
    ),
    Mutation(
        "a service is not asked whether it is still there",
        "engine/maskserve_engine/control_link/services.py",
        'self._calls.call({"op": "health"}, b"", self._patience_s)',
        "pass",
        f"{_LOST}::test_a_session_is_shared_while_its_service_lives_and_anew_behind_another",
    ),
    Mutation(
        "a service sums nets that follow those of another",
        "engine/maskserve_engine/control_link/services.py",
        "return [range(first), *(range(n, n + 1) for n in range(first, count))]",
        "return [range(first), *([range(first, count)] if first < count else [])]",
        f"{_SEVERAL}::test_only_leading_nets_of_one_service_are_summed_there",
    ),
    Mutation(
        "outputs of ControlNets are added as a batch runs the nets",
        "engine/maskserve_engine/families/control.py",
        "ready = [item for item in waiting if least is None or item[0] < least]",
        "ready = waiting",
        f"{_UNIT}/engine/families/test_net_sums.py"
        "::test_sums_are_those_of_the_row_alone_whatever_its_mates_make_run_first",
    ),
    Mutation(
        "a slot that a step still reads is handed out",
        "engine/maskserve_engine/control_link/reuse.py",
        "used_slots |= set() if added is None else {added.slot}",
        "used_slots |= set()",
        f"{_SLOTS}::test_no_slot_is_handed_out_that_a_step_still_reads",
    ),
    Mutation(
        "a slot that a later step will read is handed out",
        "engine/maskserve_engine/control_link/reuse.py",
        "used_slots = {sent.slot for sent in self._sent.values() if sent.step > step}",
        "used_slots = set[int]()",
        f"{_SLOTS}::test_no_slot_is_handed_out_that_a_later_step_will_read",
    ),
    # Which edits are cached
    Mutation(
        "dense_above_ratio is ignored",
        "engine/maskserve_engine/requests/templates.py",
        "if tokens.active / tokens.total >= self.config.dense_above_ratio:",
        "if tokens.active > tokens.total:",
        f"{_WAY}::test_an_edit_of_the_ratio_runs_dense_and_one_below_it_cached",
    ),
    Mutation(
        "masks along a side are cached",
        "engine/maskserve_engine/requests/templates.py",
        'return "mask_side" if sided else ""',
        'return ""',
        f"{_UNIT}/engine/families/test_dense_sides.py"
        "::test_an_edit_of_a_whole_side_runs_dense_and_says_so_and_others_are_cached",
    ),
    Mutation(
        "dense_steps is ignored",
        "engine/maskserve_engine/requests/templates.py",
        "if step < first",
        "if step < 0",
        f"{_UNIT}/engine/cache/test_cache.py::test_first_steps_run_dense_where_the_configuration_says_so",
    ),
    Mutation(
        "prompts do not matter to how an edit begins",
        "engine/maskserve_common/contracts/semantics.py",
        "needed = max(self.prompt if prompt else 0, self.side if side else 0)",
        "needed = self.side if side else 0",
        f"{_UNIT}/engine/families/test_dense_steps.py"
        "::test_a_base_models_edit_begins_dense_where_it_has_a_prompt_or_covers_a_side",
    ),
    Mutation(
        "one-shot images are primed",
        "engine/maskserve_engine/requests/templates.py",
        "WORTH_PRIMING = 2",
        "WORTH_PRIMING = 1",
        f"{_UNIT}/engine/cache/test_cache.py::test_a_template_is_primed_on_its_second_lookup_and_hit_on_the_third",
    ),
    Mutation(
        "the limit of drift is ignored",
        "engine/maskserve_engine/requests/audits.py",
        "if drift_record is not None and drift_record.largest > self._limit",
        "if False",
        f"{_UNIT}/engine/requests/test_audits.py::test_a_template_over_the_limit_runs_dense_and_says_so",
    ),
    # What a row computes
    Mutation(
        "the ring is ignored",
        "engine/maskserve_common/imaging/masks.py",
        "grid = grow(grid, ring, ring, axis)",
        "grid = grow(grid, 0, 0, axis)",
        f"{_UNIT}/common/imaging/test_masks.py::test_a_ring_adds_every_token_so_near_a_masked_one",
    ),
    Mutation(
        "no keys of a row's inactive tokens are loaded",
        "engine/maskserve_engine/batch/forward.py",
        "else row_part.source(index, part) for row_part in row_parts]",
        "else None for row_part in row_parts]",
        f"{_UNIT}/engine/families/flux/test_flux_cached.py::test_on_the_priming_inputs_any_mix_of_kinds_equals_dense",
    ),
    Mutation(
        "base models have their own noise everywhere",
        "engine/maskserve_engine/stages/latents.py",
        "return torch.where(mask > 0, noise, template_noise(noise.shape, seed, noise.dtype))",
        "return noise",
        f"{_UNIT}/engine/families/test_outside_noise.py"
        "::test_rows_dense_and_cached_have_one_noise_outside_the_mask",
    ),
    Mutation(
        "guidance leads the other way",
        "engine/maskserve_engine/families/unet/latents.py",
        "answer = away + self._guides * (answer - away)",
        "answer = away - self._guides * (answer - away)",
        f"{_UNIT}/engine/families/unet/test_unet_dense.py::test_a_dense_row_equals_the_pipeline",
    ),
    # Contents of responses
    Mutation(
        "paste weights are one short of whole",
        "engine/maskserve_common/imaging/masks.py",
        "np.multiply(part, np.uint8(255), out=weights[box])",
        "np.multiply(part, np.uint8(254), out=weights[box])",
        f"{_UNIT}/common/imaging/test_masks.py::test_dilation_is_a_square_of_that_many_pixels",
    ),
    Mutation(
        "the edit is pasted without its weights",
        "engine/maskserve_triton/postprocess.py",
        "out.paste(edited, (left, top), mask=Image.fromarray(part))",
        "out.paste(edited, (left, top))",
        f"{_UNIT}/common/imaging/test_postprocess.py::test_holes_in_a_mask_stay_as_they_were",
    ),
    Mutation(
        "tokens outside come back as they were left",
        "engine/maskserve_engine/families/mmdit/spans.py",
        "tokens[span.ids[: len(latents)]] = latents.to(computed.dtype)",
        "tokens[span.ids[: len(latents)]] = 0.0",
        f"{_UNIT}/engine/families/flux/test_flux_cached.py::test_inactive_tokens_come_back_as_the_template",
    ),
    Mutation(
        "what is left out stays where it was",
        "engine/maskserve_engine/families/mmdit/rows.py",
        "left_out.move(walk.change, cache.weight(walk.sigma))",
        "left_out.move(0.0, 0.0)",
        f"{_REFRESH}::test_it_is_the_pipeline_whose_other_tokens_are_foretold",
    ),
    # What a step adds from a ControlNet service
    Mutation(
        "residuals ahead are of the latents at hand",
        "engine/maskserve_engine/families/unet/latents.py",
        "        return self._answer_at(self._moved(answer, self._at), self._at + 1)",
        "        return self._answer_at(self._state, self._at + 1)",
        f"{_FAST}::test_a_row_equals_the_pipeline_whose_net_is_as_late",
    ),
    Mutation(
        "what a sampler remembers is not moved on",
        "engine/maskserve_engine/families/unet/latents.py",
        "                state.addcmul_(factor, part[:, None])",
        "                state[:, :1].addcmul_(factor[:, :1], part[:, None])",
        f"{_SAMPLERS}::test_rows_moved_together_are_what_diffusers_makes_of_each",
    ),
    Mutation(
        "images round latents are as noisy as before the step",
        "engine/maskserve_engine/families/unet/sampler.py",
        "torch.stack([*sources[1:], torch.tensor([1.0, 0.0])]).float()",
        "torch.stack(sources).float()",
        f"{_SAMPLERS}::test_rows_moved_together_are_what_diffusers_makes_of_each",
    ),
    Mutation(
        "old residuals of another scale",
        "engine/maskserve_engine/control_link/reuse.py",
        "return sent if self._scales[step] == self._scales[sent.step] else None",
        "return sent",
        f"{_FAST}::test_which_residuals_a_step_adds",
    ),
    # Models that see the source as a reference
    Mutation(
        "a step moves the context",
        f"{_FLOW}/batch.py",
        "velocity.index_fill_(0, self._still, 0.0)",
        "velocity.index_fill_(0, self._still, 1.0)",
        f"{_DENSE}[klein]",
    ),
    Mutation(
        "a mask covers the context",
        "engine/maskserve_engine/planning/flops.py",
        "tuple(mask_ratio * (n - self.context) for n in self.tokens)",
        "tuple(mask_ratio * n for n in self.tokens)",
        f"{_UNIT}/engine/spec/test_reference_counts.py"
        "::test_a_context_is_no_part_of_a_mask_and_of_what_attends",
    ),
    Mutation(
        "Kontext's reference lies where the picture does",
        "engine/maskserve_engine/families/flux/adapter.py",
        "torch.cartesian_prod(torch.tensor([number]), torch.arange(rows)",
        "torch.cartesian_prod(torch.tensor([0]), torch.arange(rows)",
        f"{_DENSE}[flux-kontext]",
    ),
    Mutation(
        "klein's reference is the next picture",
        _FLUX2,
        "REFERENCE = 10",
        "REFERENCE = 1",
        f"{_DENSE}[klein]",
    ),
    Mutation(
        "the source of models with references is drawn",
        f"{_FLOW}/preparation.py",
        "clean = image.mode() if chosen else image.sample(generator)",
        "clean = image.sample(generator)",
        f"{_DENSE}[klein]",
    ),
    Mutation(
        "klein's noise is drawn unpacked",
        _FLUX2,
        "return unpack_latents(packed.flatten(1).T, grid)",
        "return packed.reshape(clean.shape)",
        f"{_DENSE}[klein]",
    ),
    Mutation(
        "a flow map sees its own timestep twice",
        "engine/maskserve_engine/families/mmdit/batch.py",
        "1000 * (step.sigma + step.change)",
        "1000 * step.sigma",
        f"{_DENSE}[flux3-klein]",
    ),
    Mutation(
        "images see a cached context in blocks by mode",
        "engine/maskserve_engine/batch/packing.py",
        "keys += [t, i + m - c, c]",
        "keys += [t, i + m, 0]",
        f"{_UNIT}/engine/batch/test_modes.py::test_tokens_attend_to_those_of_their_mode_alone",
    ),
    Mutation(
        "klein's mask is of single latents",
        "engine/maskserve_triton/preprocess.py",
        "side = spec.vae_scale_factor * spec.mask_latents",
        "side = spec.vae_scale_factor",
        f"{_KLEIN}::test_a_mask_keeps_no_share_of_the_source_in_a_thin_stroke",
    ),
    Mutation(
        "FLUX.2's latents are as wide as their variance",
        "engine/maskserve_engine/spec/latents.py",
        "scale = 1.0 / np.sqrt(variance + epsilon)",
        "scale = 1.0 / (variance + epsilon)",
        f"{_DENSE}[klein]",
    ),
    Mutation(
        "base models are led away by another scale",
        f"{_FLOW}/adapter.py",
        "scale = settings.guidance_scale if cfg else settings.true_cfg_scale",
        "scale = 2.0 if cfg else settings.true_cfg_scale",
        f"{_DENSE}[klein-base]",
    ),
    Mutation(
        "exact references are of some time",
        "engine/maskserve_common/contracts/keys.py",
        "STILL = Anchor(0.0, 0.0, 0.0)",
        "STILL = Anchor(0.0, 500.0, 0.0)",
        f"{_DENSE}[klein-kv]",
    ),
    Mutation(
        "no keys of exact references are placed",
        "engine/maskserve_engine/batch/forward.py",
        "else tokens.source(index) for tokens in fixed_tokens], outs, slots",
        "else None for tokens in fixed_tokens], outs, slots",
        f"{_DENSE}[klein-kv]",
    ),
    Mutation(
        "rows of a template make their own references",
        "engine/maskserve_engine/loop/local_executor.py",
        "references.entry = entry",
        "pass",
        f"{_EXACT}::test_a_template_has_its_references_once_and_all_its_rows_read_them",
    ),
    Mutation(
        "references do not hear of an adapter that came late",
        f"{_FLOW}/adapter.py",
        "references.reset()  # made without them",
        "pass",
        f"{_EXACT}::test_references_are_made_again_with_adapters_that_came_late",
    ),
    Mutation(
        "references beside the source lie where it does",
        _FLUX2,
        "torch.tensor([REFERENCE * number])",
        "torch.tensor([REFERENCE * min(number, 1)])",
        f"{_CONTRACT}::test_edits_with_references_of_any_mix_are_the_pipelines[klein]",
    ),
    Mutation(
        "an edit with references reads its source's template",
        "engine/maskserve_engine/requests/templates.py",
        'return "references"',
        'return ""',
        "tests/unit/engine/families/test_references.py"
        "::test_an_edit_with_references_reads_no_template[klein-kv-off-references]",
    ),
    Mutation(
        "a blend reaches the context",
        f"{_FLOW}/rows.py",
        "computed, next_step = moved[: len(self.image.masked)], self.step + 1",
        "computed, next_step = moved[-len(self.image.masked) :], self.step + 1",
        f"{_DENSE}[klein]",
    ),
    # Edits without a mask, and pictures without a source
    Mutation(
        "a picture without a source draws a source's sample",
        f"{_FLOW}/preparation.py",
        "            return FlowStart(pack_latents(self.noise(job, generator)), None, None)",
        "            self._posterior(job.moments).sample(generator)\n"
        "            return FlowStart(pack_latents(self.noise(job, generator)), None, None)",
        f"{_WHOLE}[flux-base]",
    ),
    Mutation(
        "a picture without a source has a reference",
        "engine/maskserve_engine/spec/model_spec.py",
        'return int(self.semantics.reference and kind != "generate")',
        "return int(self.semantics.reference)",
        f"{_WHOLE}[flux3-klein]",
    ),
    Mutation(
        "an edit without a mask has a sample for a reference",
        f"{_FLOW}/preparation.py",
        "chosen = semantics.reference and (whole or not semantics.sampled)",
        "chosen = semantics.reference and not semantics.sampled",
        f"{_WHOLE}[qwen-image-edit]",
    ),
    Mutation(
        "an edit without a mask begins as noise",
        f"{_FLOW}/preparation.py",
        "latents = noise if semantics.reference else _mixed(clean, noise, schedule)",
        "latents = noise",
        f"{_WHOLE}[chroma]",
    ),
    Mutation(
        "blocks by mode are given no modes by pictures without a source",
        "engine/maskserve_engine/batch/packing.py",
        "            any(row.timeless for row in rows),",
        "            any(row.context * row.timeless for row in rows),",
        f"{_CONTRACT}::test_two_ranks_compute_the_rows_of_one[flux3-base]",
    ),
    Mutation(
        "edits without a mask are counted for their template",
        "engine/maskserve_engine/requests/templates.py",
        'if job.request.kind != "inpaint":',
        "if False:",
        f"{_UNIT}/engine/loop/test_whole_pictures.py"
        "::test_nothing_counts_primes_or_reads_a_template[klein]",
    ),
    Mutation(
        "entries of references that follow a prompt serve all prompts",
        "engine/maskserve_engine/spec/model_spec.py",
        "return self.semantics.context",
        "return False",
        f"{_WAY}::test_references_that_see_the_prompt_serve_the_one_that_they_were_primed_with",
    ),
    Mutation(
        "a key of entries that belong to a prompt does not say which",
        "engine/maskserve_engine/requests/templates.py",
        "priming_prompt=job.request.prompt if spec.primed_by_prompt else PRIMING_PROMPT,",
        "priming_prompt=PRIMING_PROMPT,",
        f"{_WAY}::test_references_that_see_the_prompt_serve_the_one_that_they_were_primed_with",
    ),
    Mutation(
        "entries that belong to a prompt are primed with the one of all templates",
        "engine/maskserve_engine/requests/templates.py",
        "return job.conditioning if self.adapter.spec.primed_by_prompt else self.prompt()",
        "return self.prompt()",
        f"{_WAY}::test_references_that_see_the_prompt_serve_the_one_that_they_were_primed_with",
    ),
    Mutation(
        "four steps share an anchor",
        "engine/maskserve_engine/families/flux2/spec.py",
        "stride=1 if distilled else _STRIDE,",
        "stride=_STRIDE,",
        _FOUR,
    ),
    Mutation(
        "anchors are of another schedule than the model's own",
        f"{_FLOW}/adapter.py",
        "            shift=shift,",
        "",
        _FOUR,
    ),
    Mutation(
        "Chroma reads what a prompt is padded with",
        "engine/maskserve_engine/families/chroma/encode.py",
        "lengths = mask.sum(1).tolist()",
        "lengths = [states.shape[1]] * len(mask)",
        f"{_DENSE}[chroma]",
    ),
    Mutation(
        "Chroma's streams have one another's vectors",
        "engine/maskserve_engine/families/chroma/adapter.py",
        "image, text = parts(of_image, 6, doubles), parts(of_text, 6, doubles)",
        "text, image = parts(of_image, 6, doubles), parts(of_text, 6, doubles)",
        f"{_DENSE}[chroma]",
    ),
    Mutation(
        "Stable Diffusion 3.5 lays pictures into a corner",
        "engine/maskserve_engine/families/sd3/adapter.py",
        "axes = [torch.arange(n) + (side - n) // 2 - side // 2 for n in grid]",
        "axes = [torch.arange(n) - side // 2 for n in grid]",
        f"{_DENSE}[sd3-large]",
    ),
    Mutation(
        "a second attention changes nothing",
        "engine/maskserve_engine/families/sd3/adapter.py",
        "return clip(add_gated(x, gate, attention_out)[0])",
        "return x",
        f"{_DENSE}[sd3-medium]",
    ),
    Mutation(
        "Stable Diffusion 3.5's nets add to the last block, too",
        "engine/maskserve_engine/families/sd3/adapter.py",
        "for number in range(of - 1 if count else 0):",
        "for number in range(of if count else 0):",
        f"{_NETS}::test_outputs_lie_where_diffusers_adds_them",
    ),
    Mutation(
        "Z-Image's nets do not change the text",
        "engine/maskserve_engine/batch/forward.py",
        "words = min(of_text, packing.text[row])",
        "words = 0",
        f"{_NETS}::test_a_row_without_a_mask_equals_the_pipeline",
    ),
    Mutation(
        "a chain of Z-Image's blocks starts without the picture",
        "engine/maskserve_engine/families/z_image/control.py",
        "control = role.before(control, stream.spans) + picture",
        "control = role.before(control, stream.spans)",
        f"{_UNIT}/engine/families/z_image/test_z_image_control.py"
        "::test_a_net_of_every_version_equals_diffusers",
    ),
    Mutation(
        "Stable Diffusion 3.5's nets see the VAE's shift, whatever they were trained with",
        "engine/maskserve_engine/families/sd3/adapter.py",
        "hint = PlainLinear(hint.weight, hint.bias + unshifted)",
        "pass",
        f"{_NETS}::test_a_row_without_a_mask_equals_the_pipeline",
    ),
    Mutation(
        "nets see the pooled prompt, whatever they were trained with",
        f"{_FLOW}/control.py",
        "if pooled is not None and not self.pooled:",
        "if False:",
        f"{_NETS}::test_a_row_without_a_mask_equals_the_pipeline",
    ),
    Mutation(
        "both passes add what nets make of the prompt",
        f"{_FLOW}/adapter.py",
        "return row.passes if control_spec.guided else row.passes[:1]",
        "return row.passes[:1]",
        f"{_NETS}::test_a_row_without_a_mask_equals_the_pipeline",
    ),
    Mutation(
        "Qwen-Image's guided answers are as long as they come out",
        "engine/maskserve_engine/families/qwen_image/adapter.py",
        "positive.mul_(length / positive.norm(dim=-1, keepdim=True))",
        "pass",
        f"{_DENSE}[qwen-image]",
    ),
    Mutation(
        "a template of Qwen-Image serves prompts of one length",
        "engine/maskserve_engine/families/qwen_image/spec.py",
        "padded_to=1",
        "padded_to=0",
        f"{_QWEN}::test_entries_do_not_depend_on_how_long_a_prompt_is",
    ),
    Mutation(
        "what a text encoder is shown stands ahead of the picture in an entry",
        "engine/maskserve_engine/cache/entries.py",
        "tensors = [torch.cat((x[self._text :], x[: self._text_tokens])) for x in tensors]",
        "tensors = [torch.cat((x[: self._text_tokens], x[self._text :])) for x in tensors]",
        f"{_QWEN_EDIT}::test_on_its_primings_inputs_a_cached_row_is_a_dense_one",
    ),
    Mutation(
        "entries of Qwen-Image-Edit are primed without words",
        f"{_FLOW}/adapter.py",
        "if self.spec.encoder_picture and not self.spec.primed_by_prompt:",
        "if self.spec.encoder_picture:",
        f"{_QWEN_EDIT}::test_on_its_primings_inputs_a_cached_row_is_a_dense_one",
    ),
    Mutation(
        "a prompt is kept for all pictures",
        "engine/maskserve_triton/prompt_encoder.py",
        'picture = " ".join((source, *(reference.pixels_id for reference in edit.references)))',
        'picture = ""',
        f"{_QWEN_EDIT}::test_prompts_are_kept_by_picture",
    ),
    Mutation(
        "references of -2511 have the row's own time",
        "engine/maskserve_engine/families/qwen_image/adapter.py",
        "return bool(self.model.zero_cond_t)",
        "return False",
        f"{_DENSE}[qwen-image-edit-2511]",
    ),
    Mutation(
        "to Qwen-Image-2.1 its sentence lies where it does without a prompt",
        _QWEN21,
        "self._spoken(count, 0, begin), visible, back)",
        "self._spoken(count, 0, begin), visible)",
        f"{_DENSE}[qwen-image-21]",
    ),
    Mutation(
        "a word of Qwen-Image-2.1 sees the next one",
        "engine/maskserve_engine/families/qwen_image21/blocks.py",
        "allowed = allowed.tril(visible_tokens)",
        "allowed = allowed.tril(visible_tokens + 1)",
        f"{_OF_QWEN21}::test_what_stands_before_the_picture_is_the_models_own_cache",
    ),
    Mutation(
        "a distilled model goes by the base model's schedule",
        f"{_FLOW}/schedule.py",
        "return tuple(sigmas) or tuple(np.linspace(1.0, 1 / steps, steps).tolist())",
        "return tuple(np.linspace(1.0, 1 / steps, steps).tolist())",
        f"{_OF_QWEN21}::test_a_distilled_model_goes_by_its_own_schedule",
    ),
    Mutation(
        "a distilled model's template is primed for the base model's schedule",
        f"{_FLOW}/adapter.py",
        "            sigmas=model_sigmas,",
        "",
        f"{_OF_QWEN21}::test_a_distilled_model_goes_by_its_own_schedule",
    ),
    Mutation(
        "a distilled model takes any number of steps",
        "engine/maskserve_triton/accept.py",
        "if spec.sigmas and steps != len(spec.sigmas):",
        "if spec.sigmas and steps > 1000:",
        f"{_OF_QWEN21}::test_other_steps_than_a_model_s_own_are_refused",
    ),
    Mutation(
        "a template of a distilled model has one anchor",
        "engine/maskserve_engine/families/qwen_image21/spec.py",
        "stride=1 if sigmas else _STRIDE,",
        "stride=_STRIDE,",
        f"{_OF_QWEN21}::test_other_steps_than_a_model_s_own_are_refused",
    ),
    Mutation(
        "a schedule may rise",
        "engine/maskserve_engine/families/qwen_image21/spec.py",
        "if not falls or len(numbers) < least:",
        "if len(numbers) < least:",
        f"{_OF_QWEN21}::test_what_is_no_schedule_is_refused",
    ),
    Mutation(
        "a processor of transformers 5 is read where those before it had theirs",
        "engine/maskserve_engine/spec/encoder_picture.py",
        'processor = read_json(whole).get("image_processor") if whole.is_file() else None',
        "processor = None",
        f"{_QWEN_EDIT}::test_what_is_shown_follows_from_the_file_that_transformers_reads",
    ),
    Mutation(
        "what a model left transparent is pasted",
        "engine/maskserve_triton/postprocess.py",
        "if pixels.shape[2] > _RGB:",
        "if pixels.shape[2] > _RGB + 1:",
        f"{_UNIT}/common/imaging/test_postprocess.py"
        "::test_what_a_model_left_transparent_shows_the_source",
    ),
    Mutation(
        "a prompt of Z-Image stands behind its picture",
        _Z_IMAGE,
        "torch.where(is_negative.to(device), factors.conj(), factors)",
        "torch.where(is_negative.to(device), factors, factors)",
        f"{_DENSE}[z-image]",
    ),
    Mutation(
        "Z-Image pads no pictures",
        _Z_IMAGE,
        "return pads_of(grid[0] * grid[1])",
        "return 0",
        f"{_DENSE}[z-image]",
    ),
    Mutation(
        "Z-Image is guided as other families are",
        _Z_IMAGE,
        "positive.add_(positive - negative, alpha=scale)",
        "positive.sub_(negative).mul_(scale).add_(negative)",
        f"{_DENSE}[z-image]",
    ),
    Mutation(
        "the key of a padded picture knows no prompt's length",
        "engine/maskserve_engine/spec/model_spec.py",
        "return 0 if tokens % self.padded_to == 0 else words + -words % self.padded_to",
        "return 0",
        f"{_OF_Z_IMAGE}::test_what_a_picture_s_entries_hold_does_not_depend_on_where_a_prompt_ends",
    ),
    Mutation(
        "a padded template is primed with its pads before the priming prompt",
        _Z_IMAGE,
        "pad_cis = self._rotary(pads_at(words + pads_of(words), pads))",
        "pad_cis = whole[text - pads : text]",
        f"{_OF_Z_IMAGE}::test_what_a_picture_s_entries_hold_does_not_depend_on_where_a_prompt_ends",
    ),
    Mutation(
        "an edit model's picture counts as a word",
        "engine/maskserve_engine/families/qwen_image/encode.py",
        "words -= _PLACE in template",
        "words -= 0",
        f"{_QWEN_EDIT}::test_a_prompt_longer_than_what_is_read_is_cut",
    ),
    Mutation(
        "an edit model's prompt is not cut",
        "engine/maskserve_engine/families/qwen_image/encode.py",
        "used_tokens = len(states) - self.text.read_of(prompt).cut",
        "used_tokens = len(states)",
        f"{_QWEN_EDIT}::test_a_prompt_longer_than_what_is_read_is_cut",
    ),
    Mutation(
        "a negative prompt's words do not hear of an adapter that came late",
        _QWEN21,
        "for words in (*befores, *(prompt.words for prompt in passes)):",
        "for words in (*befores, row.prompt.words):",
        f"{_CONTRACT}::test_a_lora_that_comes_late_is_one_that_was_there[qwen-image-21]",
    ),
    Mutation(
        "words before a picture do not hear of an adapter that came late",
        _QWEN21,
        "for words in (*befores, *(prompt.words for prompt in passes)):",
        "for words in [prompt.words for prompt in passes]:",
        f"{_CONTRACT}::test_a_lora_that_comes_late_is_one_that_was_there[qwen-image-21]",
    ),
    Mutation(
        "a padded picture of Z-Image is priced without its pads",
        _Z_IMAGE,
        "return words + pads_of(words) + self.pads(grid)",
        "return words + pads_of(words)",
        f"{_OF_Z_IMAGE}::test_an_edit_is_priced_by_the_text_that_it_computes",
    ),
    Mutation(
        "ranks that share a picture's own blocks go on with its route",
        "engine/maskserve_engine/batch/sequence_parallel.py",
        "self.share = self._share_behind",
        "pass",
        f"{_CONTRACT}::test_two_ranks_compute_the_rows_of_one[z-image]",
    ),
    # Which workflows are accepted
    Mutation(
        "a plan that makes another late is taken where one was late before",
        "engine/maskserve_workflows/scheduling.py",
        "if any(ends_without[node.key] <= node.due",
        "if all(ends_without[node.key] <= node.due",
        f"{_UNIT}/workflows/test_scheduling.py"
        "::test_a_plan_is_refused_for_what_it_makes_late_and_not_for_what_is_late_anyway",
    ),
    Mutation(
        "no plan is taken once another is late",
        "engine/maskserve_workflows/scheduling.py",
        "if any(ends_without[node.key] <= node.due",
        "if late or any(ends_without[node.key] <= node.due",
        f"{_UNIT}/workflows/test_scheduling.py"
        "::test_a_plan_is_refused_for_what_it_makes_late_and_not_for_what_is_late_anyway",
    ),
    # Step caches in host memory, beside a template too
    Mutation(
        "a step cache without memory does not move to host memory",
        "engine/maskserve_engine/batch/cache_parts.py",
        "if content is None and self._move_to_host():",
        "if False:",
        f"{_HOST_ROWS}"
        "::test_without_memory_in_mid_edit_a_cache_beside_a_template_moves_to_host_memory",
    ),
    Mutation(
        "a step cache that is begun anew lies on the device",
        "engine/maskserve_engine/batch/step_cache.py",
        "parts.host, parts.on_host = parts_before.host, parts_before.on_host",
        "pass",
        f"{_KEPT}::test_a_cache_that_is_begun_anew_lies_in_host_memory_as_the_one_before",
    ),
    Mutation(
        "a step cache beside a template keeps its host memory",
        "engine/maskserve_engine/loop/local_executor.py",
        "for reader in (self.reader, self.step_caches, self.nets) if",
        "for reader in (self.reader, self.nets) if",
        f"{_HOST_ROWS}::test_a_cache_beside_a_template_gives_the_same_picture_in_host_memory",
    ),
    Mutation(
        "a step fails whose cache beside a template does not arrive",
        "engine/maskserve_engine/loop/local_executor.py",
        "return bool(lost_caches or sum([record.lose_references() for record in records]))",
        "return bool(sum([record.lose_references() for record in records]))",
        f"{_HOST_ROWS}"
        "::test_an_edit_of_a_template_whose_step_cache_does_not_come_back_computes_its_text",
    ),
    # Several ControlNet services
    Mutation(
        "nets of one row all run at the service that was idle first",
        _SERVICES,
        "counts[number] += 1",
        "pass",
        f"{_SEVERAL}::test_each_net_runs_where_the_fewest_nets_are_open",
    ),
    Mutation(
        "a net gets a replica although nothing waits",
        _SERVICES,
        "if open_nets[service] > 1 and free is not None:",
        "if free is not None:",
        f"{_SEVERAL}::test_each_net_runs_where_the_fewest_nets_are_open",
    ),
    Mutation(
        "a lost service loads first",
        _SERVICES,
        "key=lambda s: (s.is_away, len(s.nets))",
        "key=lambda s: len(s.nets)",
        f"{_SEVERAL}::test_rows_without_the_lost_service_go_on_and_new_ones_use_those_left",
    ),
    # The fair queue
    Mutation(
        "a key that holds places is served as often as one that holds none",
        "engine/maskserve_common/shares.py",
        "return self._in_use[key], self._served_at.get(key, 0)",
        "return 0, self._served_at.get(key, 0)",
        f"{_QUEUE}::test_a_key_that_asks_for_much_waits_behind_itself_alone",
    ),
    Mutation(
        "keys that hold as much take no turns",
        "engine/maskserve_common/shares.py",
        "return self._in_use[key], self._served_at.get(key, 0)",
        "return self._in_use[key], 0",
        f"{_QUEUE}::test_keys_that_hold_as_much_take_turns",
    ),
    Mutation(
        "an item that got its place still counts as one that waits",
        "engine/maskserve_common/fair_queue.py",
        "self.waiting.give_back(turn.key)",
        "pass",
        f"{_QUEUE}::test_a_key_may_not_fill_the_queue",
    ),
    Mutation(
        "each line of a key has a turn",
        "engine/maskserve_common/fair_queue.py",
        "if rank != self.places.rank(turn.key):  # another line of the key took a place",
        "if False:",
        f"{_QUEUE}::test_a_key_with_two_lines_takes_one_turn",
    ),
    Mutation(
        "a call that leaves as a place comes free keeps it",
        "router/maskserve_router/fair_share.py",
        "else:  # the place was handed out just now",
        "elif False:",
        f"{_UNIT}/router/test_router_shares.py"
        "::test_a_call_that_leaves_as_a_place_comes_free_holds_none",
    ),
    # Node files
    Mutation(
        "a router imports what a node's body needs",
        _NODE_FILES,
        "if isinstance(statement, ast.Import | ast.ImportFrom):",
        "if False:",
        f"{_OF_NODE_FILES}::test_signatures_are_read_without_the_model",
    ),
    Mutation(
        "a file takes the node of another one",
        _NODE_FILES,
        "if (earlier := self._types.get(name)) is not None and earlier.file != file:",
        "if False:",
        f"{_OF_NODE_FILES}::test_a_bad_file_is_left_out_in_a_sentence",
    ),
    Mutation(
        "two versions of a node differ in nothing if their settings do",
        "engine/maskserve_workflows/node_types.py",
        "return f\"({', '.join([*inputs, *settings])}) -> {', '.join(outputs)}\"",
        "return f\"({', '.join(inputs)}) -> {', '.join(outputs)}\"",
        f"{_OF_NODE_FILES}::test_a_signature_tells_versions_apart",
    ),
    Mutation(
        "another version of a node runs a call",
        "engine/maskserve_triton/nodes.py",
        'if task.signature not in ("", kind.signature):',
        "if False:",
        "tests/triton/test_nodes.py::test_a_class_that_breaks_its_signature_fails_its_call",
    ),
    # Calls of nodes, and their kept answers
    Mutation(
        "an answer is kept for all keys",
        "router/maskserve_router/nodes/node_pool.py",
        "AnswerKey(client.scope, message.digest)",
        'AnswerKey("", message.digest)',
        f"{_RUNS}::test_answers_of_nodes_are_kept_for_their_key",
    ),
    Mutation(
        "equal calls at once are all made",
        _KEPT_ANSWERS,
        "while (answer := self._answers.get(key)) is not None or key in self._pending:",
        "while (answer := self._answers.get(key)) is not None:",
        f"{_RUNS}::test_answers_of_nodes_are_kept_for_their_key",
    ),
    Mutation(
        "an answer that makes room leaves its files",
        _KEPT_ANSWERS,
        "self._fair_share.later(self._values.free, names, key.scope, self._owner)",
        "pass",
        f"{_BY_NAME}::test_kept_answers_that_make_room_leave_no_files",
    ),
    Mutation(
        "a kept answer whose values are lost is given",
        _KEPT_ANSWERS,
        "if not self._values.share(names, scope, self._owner):  # renews their time to live",
        "if False:",
        f"{_BY_NAME}::test_kept_answers_that_are_only_read_do_not_expire",
    ),
    Mutation(
        "a server of another host is as near as one of this",
        "router/maskserve_router/nodes/node_pool.py",
        "return *score, server.host not in (None, self._values.host), server.address",
        "return *score, False, server.address",
        f"{_BY_NAME}::test_of_servers_that_have_nothing_to_do_one_of_this_host_is_asked",
    ),
    Mutation(
        "a server with another version of a node fails the call",
        "router/maskserve_router/nodes/node_pool.py",
        "if OTHER_VERSION in failure.details:",
        "if False:",
        f"{_RUNS}::test_a_server_with_another_version_of_a_node_is_left_out",
    ),
    Mutation(
        "a server with other weights of a model gets calls",
        "router/maskserve_router/nodes/node_pool.py",
        'if x.revision(model) in ("", current)]',
        "]",
        f"{_RUNS}::test_of_servers_with_two_revisions_of_a_model_those_of_the_first_get_calls",
    ),
    Mutation(
        "a server that failed a call is tried again",
        "engine/maskserve_common/servers/call_tries.py",
        "if failure.status is not Status.UNAVAILABLE:",
        "if False:",
        f"{_RUNS}::test_a_server_that_failed_a_call_is_not_asked_while_another_comes_back",
    ),
    Mutation(
        "a server without room for a model ends a call that another server lost",
        "router/maskserve_router/nodes/node_pool.py",
        "elif _has(failure, _UNABLE) and not failure.untaken:",
        "elif False:",
        f"{_RUNS}::test_a_lost_server_that_alone_can_run_a_call_is_waited_for",
    ),
    # A router of edits alone
    Mutation(
        "every router imports workflows",
        "router/maskserve_router/router.py",
        "if not (files.folder or files.nodes or files.node_path):",
        "if False:",
        f"{_LIGHT}::test_a_router_of_edits_imports_neither_jobs_nor_workflows",
    ),
    Mutation(
        "a router of node files alone has no workflows",
        "router/maskserve_router/router.py",
        "if not (files.folder or files.nodes or files.node_path):",
        "if not (files.folder or files.nodes):",
        f"{_LIGHT}::test_plans_or_node_servers_import_workflows",
    ),
    Mutation(
        "a router without the extra `workflows` ends with a trace",
        "router/maskserve_router/extras.py",
        "if missing.startswith(_OWN):",
        "if True:",
        f"{_LIGHT}::test_without_the_extra_workflows_cannot_be_configured",
    ),
    # Replicas of the encoder and the decoder
    Mutation(
        "a lost request of a stage is not sent again",
        "engine/maskserve_triton/replicas.py",
        "tries.record_failure(replica, failure)",
        "raise",
        f"{_STAGES}::test_a_replica_that_ends_loses_no_request[killed]",
    ),
    Mutation(
        "a busy replica gets as many requests as an idle one",
        "engine/maskserve_triton/replicas.py",
        "return not replica.up, len(replica.calls), replica.turn",
        "return not replica.up, 0, replica.turn",
        f"{_STAGES}::test_requests_go_to_the_replica_with_the_fewest",
    ),
    Mutation(
        "a request of a stage goes round its replicas until it is late",
        "engine/maskserve_common/servers/call_tries.py",
        "if not (failure.lost and self._tries.goes_on(failure)):",
        "if False:",
        f"{_STAGES}::test_a_request_that_ends_its_replicas_is_given_up",
    ),
    Mutation(
        "a silent replica keeps its requests",
        "engine/maskserve_common/servers/pool.py",
        "if server.misses >= self._lost_misses and others_answer:",
        "if False:",
        f"{_STAGES}::test_a_replica_that_ends_loses_no_request",
    ),
    Mutation(
        "a replica of another model goes on to get requests",
        "engine/maskserve_common/servers/pool.py",
        "if name not in server.problems]",
        "]",
        f"{_UNIT}/common/servers/test_call_tries.py"
        "::test_a_server_is_left_out_of_one_name_until_it_has_been_away",
    ),
    Mutation(
        "a replica of another model fails requests",
        "engine/maskserve_triton/replicas.py",
        'return OTHER_STAGES if OTHER_STAGES in failure.details else ""',
        'return ""',
        f"{_STAGES}::test_a_replica_of_another_model_is_refused_and_the_others_go_on",
    ),
    # Jobs, and masks with grey
    Mutation(
        "a lost router ends its job",
        "router/maskserve_router/jobs/store.py",
        "    return and_(JOBS.c.id == name, JOBS.c.fence == fence)",
        "    return and_(JOBS.c.id == name)",
        f"{_UNIT}/router/test_job_store.py::test_a_late_writer_fails_on_the_fence",
    ),
    Mutation(
        "a call that ends its servers goes to a third",
        "engine/maskserve_common/servers/failure.py",
        "_MOST_LOST = 2",
        "_MOST_LOST = 3",
        f"{_UNIT}/router/test_workflows.py::test_a_failure_without_a_word_is_tried_at_one_other",
    ),
    Mutation(
        "a redirect takes a webhook",
        "router/maskserve_router/jobs/webhooks.py",
        "if 200 <= status < 300:",
        "if 200 <= status < 400:",
        f"{_UNIT}/router/test_jobs.py::test_a_webhook_is_told_until_it_is_taken",
    ),
    Mutation(
        "grey is white",
        "engine/maskserve_engine/stages/latents.py",
        "return max(steps - after, 1) / steps",
        "return 1 / (255 * steps)",
        f"{_UNIT}/engine/families/mmdit/test_flow_family.py::test_rows_of_any_mix_are_the_pipelines",
    ),
    # Schedules, errors, plans, prices and requests: each by what it promises
    Mutation(
        "dense steps at an edit's end are not known as such",
        "engine/maskserve_engine/batch/step_cache.py",
        "return frozenset(sorted(self.refresh_steps)[:1]) | self._at_end",
        "return frozenset(sorted(self.refresh_steps)[:1])",
        f"{_UNIT}/engine/requests/test_controlled_refreshes.py::test_where_no_refresh_step_is_near_enough_the_rest_is_dense",
    ),
    Mutation(
        "a schedule that begins later looks ahead to its last steps",
        "engine/maskserve_engine/batch/step_cache.py",
        "return replace(self, refresh_steps=last_steps.union(places), dense_from=end)",
        "return replace(self, refresh_steps=last_steps.union(places))",
        f"{_KEPT}::test_a_schedule_that_begins_later_ends_with_dense_steps",
    ),
    Mutation(
        "a schedule by errors forgets the refresh step at hand",
        "engine/maskserve_engine/batch/step_cache.py",
        "so_far = {refresh for refresh in self.refresh_steps if refresh <= step}",
        "so_far = {refresh for refresh in self.refresh_steps if refresh < step}",
        f"{_UNIT}/engine/requests/test_controlled_refreshes.py::test_its_errors_place_an_edits_refresh_steps",
    ),
    Mutation(
        "the share of dense steps is one of all steps",
        "engine/maskserve_engine/batch/step_cache.py",
        "len(self.dense.intersection(left)) / len(left),",
        "len(self.dense.intersection(left)) / steps,",
        f"{_KEPT}::test_a_schedule_that_begins_later_ends_with_dense_steps",
    ),
    Mutation(
        "errors of a step cache that is begun anew are lost",
        "engine/maskserve_engine/batch/step_cache.py",
        "self.errors = before.errors.for_new_cache()",
        "self.errors = LookaheadErrors()",
        f"{_KEPT}::test_lookaheads_of_a_cache_that_is_begun_anew_are_forgotten_and_errors_are_kept",
    ),
    Mutation(
        "a residual correction is as large at every step",
        "engine/maskserve_engine/batch/residual_correction.py",
        "return replace(entry, changes=(Change(correction.parts, sigma / self._sigma),))",
        "return replace(entry, changes=(Change(correction.parts, 1.0),))",
        f"{_KEPT}::test_residual_corrections_are_counted_among_its_bytes",
    ),
    Mutation(
        "the second-order term is that of another parabola",
        "engine/maskserve_engine/batch/step_cache.py",
        "(Change(tokens.bends, weight * (1.0 + weight)),)",
        "(Change(tokens.bends, weight * weight),)",
        f"{_REFRESH}::test_it_is_the_pipeline_whose_other_tokens_are_foretold",
    ),
    Mutation(
        "the second-order term takes no bytes",
        "engine/maskserve_engine/batch/step_cache.py",
        "return tuple(chain(*self.tokens))",
        "return tuple(chain(*self.tokens[:2]))",
        f"{_REFRESH}::test_what_is_booked_is_what_is_kept",
    ),
    Mutation(
        "a row with a template keeps all tokens but the last as its text",
        "engine/maskserve_engine/batch/step_cache.py",
        "text = len(x) - self._total if self._words is None else self._words",
        "text = len(x) - self._total",
        f"{_REFRESH}::test_rows_whose_first_step_lifts_entries_do_not_depend_on_their_batch",
    ),
    Mutation(
        "a lookahead's error is a share of the lookahead",
        "engine/maskserve_engine/batch/lookahead_errors.py",
        "for tensor in (answer - ahead, answer)",
        "for tensor in (answer - ahead, ahead)",
        f"{_KEPT}::test_lookaheads_of_a_cache_that_is_begun_anew_are_forgotten_and_errors_are_kept",
    ),
    Mutation(
        "lookahead errors grow as distances do",
        "engine/maskserve_engine/planning/refresh_control.py",
        "scale = (self.tolerance / error) ** (1.0 / _ORDER) if error > 0.0 else self.growth",
        "scale = self.tolerance / error if error > 0.0 else self.growth",
        f"{_CONTROL}::test_the_next_refresh_step_lies_within_the_distance_that_the_error_allows",
    ),
    Mutation(
        "a refresh step that is too far is no failure",
        "engine/maskserve_engine/planning/refresh_control.py",
        "return self.dense_after(step)._replace(failed=True)",
        "return self.dense_after(step)",
        f"{_CONTROL}::test_where_the_nearest_refresh_step_is_too_far_the_rest_is_dense",
    ),
    Mutation(
        "distances grow without a bound",
        "engine/maskserve_engine/planning/refresh_control.py",
        "reach = (self.distances[before] - rest) * min(scale, self.growth)",
        "reach = (self.distances[before] - rest) * scale",
        f"{_CONTROL}::test_the_next_refresh_step_lies_within_the_distance_that_the_error_allows",
    ),
    Mutation(
        "the next refresh step may lie beyond reach",
        "engine/maskserve_engine/planning/refresh_control.py",
        "(places or begin - distance <= reach)",
        "True",
        f"{_CONTROL}::test_the_next_refresh_step_lies_within_the_distance_that_the_error_allows",
    ),
    Mutation(
        "distances in blends grow as elsewhere",
        "engine/maskserve_engine/planning/refresh_control.py",
        "first, growth = 0.0, _BLENDED_GROWTH",
        "first = 0.0",
        f"{_CONTROL}::test_where_all_is_noisy_around_distances_grow_more_slowly",
    ),
    Mutation(
        "a higher promise looks ahead to the last step, too",
        "engine/maskserve_engine/planning/refresh_control.py",
        "len(sigmas) <= _FEW_STEPS and fidelity <= _FEW_FIDELITY:",
        "len(sigmas) <= _FEW_STEPS:",
        f"{_CONTROL}::test_in_few_steps_a_lower_promise_looks_ahead_to_the_last",
    ),
    Mutation(
        "answers of the step before are forgotten",
        "engine/maskserve_engine/control_link/reuse.py",
        "if at >= step - 1}",
        "if at >= step}",
        f"{_SLOTS}::test_a_step_adds_what_was_asked_for_it_or_by_the_step_before",
    ),
    Mutation(
        "residuals ahead are of any tokens",
        "engine/maskserve_engine/control_link/reuse.py",
        "return sent is None or sent.computed != computed",
        "return sent is None",
        f"{_SLOTS}::test_residuals_are_asked_for_ahead_where_a_net_acts_and_none_lie_ready",
    ),
    Mutation(
        "residuals are asked for where no net acts",
        "engine/maskserve_engine/control_link/reuse.py",
        "if not self._fast or later >= len(self._scales) or not self.acts(later):",
        "if not self._fast or later >= len(self._scales):",
        f"{_SLOTS}::test_residuals_are_asked_for_ahead_where_a_net_acts_and_none_lie_ready",
    ),
    Mutation(
        "residuals that have failed are added",
        "engine/maskserve_engine/control_link/reuse.py",
        "if sent is None or sent.computed != computed or failed(sent.number):",
        "if sent is None or sent.computed != computed:",
        f"{_SLOTS}::test_a_step_adds_what_was_asked_for_it_or_by_the_step_before",
    ),
    Mutation(
        "where the host is slow only its own seconds are left out",
        "engine/maskserve_engine/planning/planner.py",
        "slowed = replace(costs, compute=np.maximum(costs.compute, costs.launching))",
        "slowed = costs",
        f"{_PLANNER}::test_no_plain_plan_and_no_plan_of_the_device_alone_is_faster_where_the_host_is_slow",
    ),
    Mutation(
        "LoRAs change no plan",
        "engine/maskserve_engine/planning/planner.py",
        "loras = sum(part.added.cached for part in (cached, dense) if part and part.added)",
        "loras = 0.0",
        f"{_PLANS}::test_rows_with_loras_are_another_plan",
    ),
    Mutation(
        "dense rows change no plan",
        "engine/maskserve_engine/planning/planner.py",
        "dense_terms = (float(dense.rows), dense.text) if dense is not None else (0.0, 0.0)",
        "dense_terms = (0.0, 0.0)",
        f"{_PLANS}::test_dense_rows_beside_are_another_plan",
    ),
    Mutation(
        "the oldest plan is dropped, however lately it was used",
        "engine/maskserve_engine/planning/planner.py",
        "            self._plans.move_to_end(key)",
        "            pass",
        f"{_PLANS}::test_the_least_recently_used_goes_first",
    ),
    Mutation(
        "plans are cut by the bounds of others",
        "engine/maskserve_engine/planning/planner.py",
        "most_sum_absent, most_sum_present = ceiling - rest_absent, ceiling - rest_present",
        "most_sum_absent, most_sum_present = ceiling - rest_present, ceiling - rest_absent",
        f"{_PLANNER}::test_equals_brute_force_where_a_dense_block_precedes_one_that_projects",
    ),
    Mutation(
        "a plan for one step serves steps that repeat",
        "engine/maskserve_engine/planning/planner.py",
        "key = (subject, lead, *(",
        "key = (subject, *(",
        f"{_PLANS}::test_a_plan_for_one_step_is_another_than_for_steps_that_repeat",
    ),
    Mutation(
        "no bytes take as long as the first one",
        "engine/maskserve_engine/planning/cost_model.py",
        "return self.loads[tier].seconds(size) if size else 0.0",
        "return self.loads[tier].seconds(size)",
        f"{_UNIT}/engine/planning/test_cost_model.py::test_predictions",
    ),
    Mutation(
        "what is left of a plan ends a piece later",
        "engine/maskserve_workflows/scheduling.py",
        "return ReadyNode(key, arrival, due, piece_s, max(path_s - piece_s, 0.0), at_once=pieces)",
        "return ReadyNode(key, arrival, due, piece_s, path_s, at_once=pieces)",
        f"{_NODES}::test_pieces_of_what_is_left_make_up_its_path_and_its_work",
    ),
    Mutation(
        "a place loads a model for each node",
        "engine/maskserve_workflows/scheduling.py",
        "loaded[name] | node.models",
        "loaded[name]",
        f"{_NODES}::test_a_model_that_a_node_loads_is_there_for_the_next",
    ),
    Mutation(
        "a node runs anywhere",
        "engine/maskserve_workflows/scheduling.py",
        "return all(node.only is None and not node.inputs for node in nodes) and all(",
        "return all(not node.inputs for node in nodes) and all(",
        f"{_NODES}::test_a_node_runs_only_where_it_may",
    ),
    Mutation(
        "inputs that lie at a place are fetched",
        "engine/maskserve_workflows/scheduling.py",
        "fetched = sum(size for name, size in node.inputs.items() if name != place.name)",
        "fetched = sum(node.inputs.values())",
        f"{_NODES}::test_inputs_are_fetched_from_other_places_alone",
    ),
    Mutation(
        "inputs lie nowhere where places have the same models",
        "engine/maskserve_workflows/scheduling.py",
        "return all(node.only is None and not node.inputs for node in nodes) and all(",
        "return all(node.only is None for node in nodes) and all(",
        f"{_NODES}::test_inputs_are_fetched_from_other_places_alone",
    ),
)


class Copy:
    """A copy of a tree, in which one file at a time can be made wrong."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        for name in _COPIED:
            shutil.copytree(tree / name, folder / name, ignore=ignored)
        shutil.copy(tree / "pyproject.toml", folder)
        (folder / "assets").symlink_to(tree / "assets")

    @contextmanager
    def with_mutation(self, mutation: Mutation) -> Iterator[None]:
        """Replace the line while the context lasts. Raises ValueError if the line is missing or not
        unique.
        """
        path = self.folder / mutation.file
        right = path.read_text(encoding="utf-8")
        if right.count(mutation.line) != 1 or "\n" in mutation.line:
            raise ValueError(f"{mutation.file} does not hold once: {mutation.line}")
        path.write_text(right.replace(mutation.line, mutation.wrong), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(right, encoding="utf-8")

    def test(self, *tests: str) -> tuple[int, str]:
        """Return the exit code of pytest and its output; a test that takes too long counts as
        failed.
        """
        files, names = zip(*(test.split("::") for test in tests), strict=True)
        # Select by file and name, so that pytest leaves out the cases that normal runs leave out.
        chosen = [*dict.fromkeys(files), "-k", " or ".join(dict.fromkeys(names))]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *chosen]
        # Python identifies bytecode by a file's size and second: a mutation might change neither.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("MASKSERVE_FULL", None)  # run the cases of normal runs
        try:
            run = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True,
                timeout=_PATIENCE_S * len(tests), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return _FAILED, _TOO_LONG
        return run.returncode, run.stdout[-2000:] + run.stderr[-2000:]


def judge(copy: Copy, mutation: Mutation) -> tuple[Verdict, str]:
    """Run a mutation's test. Return the verdict and a sentence for the report."""
    try:
        with copy.with_mutation(mutation):
            code, output = copy.test(mutation.test)
    except ValueError as error:
        return "broken", str(error)
    if code == _FAILED:
        return "killed", f"{mutation.test} {output if output == _TOO_LONG else ''}".rstrip()
    if code == _PASSED:
        return "survived", mutation.test
    return "broken", f"{mutation.test} was not run:\n{output}"


def run(mutations: Sequence[Mutation], tree: Path = CHECKOUT) -> dict[str, Verdict]:
    """Judge each mutation in turn in a copy of `tree`, and print the verdict.

    The tests of a file run once without a mutation, before the first one that they judge.

    Raises:
        RuntimeError: a test fails without any mutation, so its failure would prove nothing.
    """
    unchecked: dict[str, dict[str, None]] = {}
    for mutation in mutations:
        unchecked.setdefault(_test_file(mutation.test), {})[mutation.test] = None
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder), tree)
        for mutation in mutations:
            file = _test_file(mutation.test)
            if tests := unchecked.pop(file, None):
                begin = time.perf_counter()
                code, output = copy.test(*tests)
                if code != _PASSED:
                    raise RuntimeError(f"the tests do not pass as they are:\n{output}")
                _report("passes", begin, file)
            begin = time.perf_counter()
            verdicts[mutation.name], about = judge(copy, mutation)
            _report(verdicts[mutation.name], begin, f"{mutation.name}: {about}")
    return verdicts


def _test_file(test: str) -> str:
    return test.partition("::")[0]


def _report(verdict: str, begin: float, about: str) -> None:
    print(f"{verdict:8} {time.perf_counter() - begin:5.1f} s  {about}", flush=True)


def main() -> int:
    """Run all mutations; the exit code is 0 if every mutation was killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "words", nargs="*", help="only mutations whose name or file has one of these"
    )
    words = parser.parse_args().words
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not words or any(word in mutation.name or word in mutation.file for word in words)
    ]
    if not chosen:
        parser.error(f"no mutation's name or file has any of: {', '.join(words)}")
    verdicts = run(chosen)
    killed = sum(verdict == "killed" for verdict in verdicts.values())
    print(f"{killed} of {len(verdicts)} killed")
    return 0 if killed == len(verdicts) else 1
