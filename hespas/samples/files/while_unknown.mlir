module @jit_while_unknown attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<256xf32>, %arg1: tensor<256x256xf32>) -> (tensor<256xf32> {jax.result_info = "result[0]"}, tensor<f32> {jax.result_info = "result[1]"}) {
    %cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %0:3 = stablehlo.while(%iterArg = %arg1, %iterArg_0 = %arg0, %iterArg_1 = %cst) : tensor<256x256xf32>, tensor<256xf32>, tensor<f32>
    cond {
      %cst_2 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
      %1 = stablehlo.compare GT, %iterArg_1, %cst_2, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    } do {
      %1 = stablehlo.dot_general %iterArg, %iterArg_0, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<256x256xf32>, tensor<256xf32>) -> tensor<256xf32>
      %2 = func.call @norm(%1) : (tensor<256xf32>) -> tensor<f32>
      %3 = stablehlo.broadcast_in_dim %2, dims = [] : (tensor<f32>) -> tensor<256xf32>
      %4 = stablehlo.divide %1, %3 : tensor<256xf32>
      %5 = stablehlo.subtract %4, %iterArg_0 : tensor<256xf32>
      %6 = stablehlo.abs %5 : tensor<256xf32>
      %cst_2 = stablehlo.constant dense<0xFF800000> : tensor<f32>
      %7 = stablehlo.reduce(%6 init: %cst_2) applies stablehlo.maximum across dimensions = [0] : (tensor<256xf32>, tensor<f32>) -> tensor<f32>
      stablehlo.return %iterArg, %4, %7 : tensor<256x256xf32>, tensor<256xf32>, tensor<f32>
    }
    return %0#1, %0#2 : tensor<256xf32>, tensor<f32>
  }
  func.func private @norm(%arg0: tensor<256xf32>) -> tensor<f32> {
    %0 = stablehlo.multiply %arg0, %arg0 : tensor<256xf32>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %1 = stablehlo.reduce(%0 init: %cst) applies stablehlo.add across dimensions = [0] : (tensor<256xf32>, tensor<f32>) -> tensor<f32>
    %2 = stablehlo.sqrt %1 : tensor<f32>
    return %2 : tensor<f32>
  }
}
