// A batch of unknown size, at most 32: figures are upper bounds. get/set_dimension_size move between both worlds.
module @bounded {
  func.func public @main(%x: tensor<32x64xf32>, %n: tensor<i32>, %w: tensor<64x16xf32>) -> (tensor<?x64xf32, #stablehlo.bounds<32, ?>>, tensor<i32>, tensor<32x16xf32>) {
    %0 = stablehlo.set_dimension_size %x, %n, dim = 0 : (tensor<32x64xf32>, tensor<i32>) -> tensor<?x64xf32, #stablehlo.bounds<32, ?>>
    %1 = stablehlo.tanh %0 : tensor<?x64xf32, #stablehlo.bounds<32, ?>>
    %2 = stablehlo.get_dimension_size %1, dim = 0 : (tensor<?x64xf32, #stablehlo.bounds<32, ?>>) -> tensor<i32>
    %3 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<32x64xf32>, tensor<64x16xf32>) -> tensor<32x16xf32>
    return %1, %2, %3 : tensor<?x64xf32, #stablehlo.bounds<32, ?>>, tensor<i32>, tensor<32x16xf32>
  }
}
