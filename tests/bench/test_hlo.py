"""Reading the text of compiled programs."""

from jaxmix.bench.hlo import carry_copies, computations, custom_calls, loop_bodies

TEXT = """HloModule jit_loop, is_scheduled=true

%wrapped_copy_computation (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %copy.9 = f32[8,4]{1,0} copy(%p)
}

%body (arg: (s32[], f32[8,4], f32[8,4])) -> (s32[], f32[8,4], f32[8,4]) {
  %arg = (s32[], f32[8,4]{1,0}, /*index=2*/f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%arg), index=1
  %y = f32[8,4]{1,0:T(8,128)} get-tuple-element(%arg), index=2
  %small = s32[] copy(%i)
  %turned = f32[8,4]{0,1} copy(%x)
  %carried = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%wrapped_copy_computation
  %made = (f32[8,4]{1,0}, s8[64]{0}) custom-call(%turned), custom_call_target="mosaic_gpu_v2", backend_config={}
  %result = f32[8,4]{1,0} get-tuple-element(%made), index=0
  %inner = f32[8,4]{1,0} add(%result, %carried)
  %within = f32[8,4]{1,0} copy(%inner)
  %again = f32[8,4]{1,0} negate(%within)
  %handed = f32[8,4]{1,0} copy(%again)
  ROOT %tuple = (s32[], f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%small, %handed, %y)
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %outside = f32[8,4]{1,0} copy(%a)
  %loop = (s32[], f32[8,4]{1,0}, f32[8,4]{1,0}) while(%outside), condition=%cond, body=%body
  ROOT %out = f32[8,4]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_computations_and_loop_bodies_are_found():
    every = computations(TEXT)
    assert list(every) == ["wrapped_copy_computation", "body", "main"]
    assert list(loop_bodies(TEXT)) == ["body"]
    lines = {line.name: line for line in every["body"]}
    assert lines["x"].entries == 32
    assert lines["arg"].entries == lines["made"].entries == 0
    assert lines["y"].layout == lines["x"].layout == "{1,0}"
    assert lines["inner"].operands == ("result", "carried")
    assert lines["tuple"].is_root


def test_copies_of_what_is_carried_count_and_others_do_not():
    assert carry_copies(TEXT, at_least=2) == ["carried", "handed"]
    assert carry_copies(TEXT, at_least=33) == []


def test_custom_calls_are_named():
    assert custom_calls(TEXT) == ["mosaic_gpu_v2"]
