"""x"""
FITTED={"products_hopper":.58,"products_ampere":.81,"width_hopper":74.,"width_ampere":554.,"tokens":71.,"attention_hopper":.27,"attention_ampere":.34,"traffic":.83,"eager":5.1,"power":.6,"fp8":1.65,"jitter":.006,"interference":.1,"hop":3e-6,"far_hop":16e-6}
