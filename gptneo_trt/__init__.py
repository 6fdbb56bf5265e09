"""Build GPT-Neo with TensorRT and measure what each variant loses; one verb a module.

errors          the error tree
data            what travels between the stages
variant         what a row quantizes, and how
variants        what can be built, as rows
json_file       a JSON object that anybody may have written -> dict, within bounds
architecture    config.json -> Architecture
stored_tensors  one safetensors file -> its tensors
weights         safetensors, single or sharded -> arrays
hub             one pinned commit of the hub -> folder, offline first
hub_worker      the child process that downloads it
checkpoint      hub id, folder, bundled or random -> Checkpoint
text_sources    where the texts are, as rows
tokenizer       tokenizer.json, of GPT-Neo's kind only -> Tokenizer
texts           text -> token ids with hashes and counts
reference       Checkpoint -> Hugging Face model -> logits
calibrators     ModelOpt, and what it sees of the inputs of modules
calibrate       Hugging Face model, tokens -> Scales
scales          Scales <-> JSON
smoothing       range of activations -> weights that read them: Checkpoint, factors -> Checkpoint
backend         which TensorRT is here, and what differs between its flavours
layers          pieces of a network: linear, layer norm, attention, quantize-dequantize
blocks          products in INT4 and NVFP4, whose weights have a scale a block
masks           what a query may see: causal, and the window of a local layer
network         Checkpoint, Variant, Scales, phase -> INetworkDefinition
inspection      INetworkDefinition -> which projections are quantized; its fingerprint
plans           network -> plan, in a child process; the plan cache
plan_worker     the child process that builds one
child_process   how a child process ended; that it ends with its parent
memory          how much is left, and how many builds it holds
targets         which GPU is here, and what each target needs
gpu_watch       clocks, temperature, throttling and other processes of a GPU while it is timed
known_failures  what is expected to fail, where, and with which message, as rows
runtime         plan -> ICudaEngine and context; what it computes in FP8
engine          plan -> executor on the GPU
cuda_graph      work on a GPU -> replay of one CUDA graph
nvfp4           a weight in NVFP4: FP4 in blocks of 16 with FP8 block scales
interpreter     INetworkDefinition -> executor on PyTorch, anywhere
operators       what each TensorRT layer computes, in PyTorch
quantizing      those of Quantize, Dequantize and DynamicQuantize
supported       what readers of layers share
number_formats  rounding to FP8, FP4, INT8 and INT4, in PyTorch
summation       the same sums in another order, as another processor adds them
decoder         tokens -> logits, K and V, through prefill or decode, over either executor
timed_regions   what a latency is the time of, in words
timing          two executors -> ratio of their times with an interval
alternatives    what a user would otherwise run, as rows
static_step     a decode step in PyTorch with a static cache
metrics         logits, logits, tokens -> Metrics
paired          differences to a stored run, paired a token
ratios          loss over the floor's, perplexity over the reference's, top-1 drop; with bounds
baselines       Metrics <-> baselines/; differences
token_values    values a token <-> .tokens.npz
token_profiles  values a token -> KL over position, its distribution, the worst tokens
verdicts        value, limit, baseline -> Cell
engine_verdicts time ratio, engine excess -> Cell
scale_verdicts  calibrated ranges, stored ranges -> Cell
results         Cells, values -> results.json
decisions       results.json -> what may ship, and why, in words
speeds          results.json -> which rows are faster than fp16, and what else is
claims          results.json -> what may be said of each row
report          Cells, values -> the tables
plots           results.json -> SVG
render          results.json -> report.md and report.html
compare         two results.json -> which cells changed beyond noise
study           results.json -> beside what the study published
search          results.json of rows of one kind each -> which sets are worth building
provenance      commit, versions, machine
whole_file      write files that appear whole or not at all

Nothing is imported here: ``gptneo_trt.metrics`` must load where neither torch,
transformers, modelopt nor TensorRT is installed.
"""
