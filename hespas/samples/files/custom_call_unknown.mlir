module @jit_unknown_target attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<128x256xf32>) -> (tensor<128x256xf32> {jax.result_info = "result"}) {
    %cst = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<128x256xf32>
    %1 = stablehlo.multiply %arg0, %0 : tensor<128x256xf32>
    %2 = stablehlo.custom_call @acme_fused_rotary(%1) {backend_config = "", mhlo.backend_config = {base = 1.000000e+04 : f64}, operand_layouts = [dense<[1, 0]> : tensor<2xindex>], result_layouts = [dense<[1, 0]> : tensor<2xindex>]} : (tensor<128x256xf32>) -> tensor<128x256xf32>
    %3 = stablehlo.tanh %2 : tensor<128x256xf32>
    return %3 : tensor<128x256xf32>
  }
}
