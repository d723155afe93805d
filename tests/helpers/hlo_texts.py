"""The text of a compiled program for two slices, with its loop and its exchange."""

HANDLER = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"'

RENDEZVOUS = HANDLER + ',_xla_host_transfer_rendezvous="psum.1_0",_xla_megascale_transfer_type="ALL_REDUCE"}'

TWO_SLICES = f"""HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %p = (s32[], f32[8,4]{{1,0:T(8,128)}}) parameter(0)
  %x = f32[8,4]{{1,0}} get-tuple-element(%p), index=1
  %w = f32[4,4]{{1,0}} constant({{...}})
  %y = f32[8,4]{{1,0}} convolution(%x, %w), dim_labels=bf_io->bf
  ROOT %t = (s32[], f32[8,4]{{1,0}}) tuple(%i, %y)
}}

%condition (p.1: (s32[], f32[8,4])) -> pred[] {{
  %p.1 = (s32[], f32[8,4]{{1,0}}) parameter(0)
  %bound = s32[] constant(3)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  ROOT %lt = pred[] compare(%i.1, %bound), direction=LT
}}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {{
  %a = f32[8,4]{{1,0}} parameter(0)
  %after-all = token[] after-all()
  %send = (f32[2,8,128]{{2,1,0:T(8,128)}}, u32[]{{:S(2)}}, token[]) send(%a, %after-all), channel_id=2, {RENDEZVOUS}
  %recv = (f32[2,8,128]{{2,1,0:T(8,128)}}, u32[]{{:S(2)}}, token[]) recv(%after-all), channel_id=1, {RENDEZVOUS}
  %loop = (s32[], f32[8,4]{{1,0}}) while(%init), condition=%condition, body=%body
  %send-done = token[] send-done(%send), channel_id=2, {HANDLER}}}
  %recv-done = (f32[2,8,128]{{2,1,0:T(8,128)}}, token[]) recv-done(%recv), channel_id=1, {HANDLER}}}
  ROOT %late = f32[8,8]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}
"""
