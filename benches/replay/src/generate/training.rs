//! Training: state that stays, then steps whose activations are freed in the order backward.

use super::{Block, Log};

const LAYERS: usize = 8;
/// The model's width and vocabulary.
const WIDTH: u64 = 1024;
const WORDS: u64 = 16_384;
/// PyTorch's caching allocator rounds to this.
const ROUND: u64 = 512;
/// Python's thread, and autograd's, which runs backward.
const MAIN: u32 = 1;
const BACKWARD: u32 = 2;

fn allocate(log: &mut Log, thread: u32, bytes: u64) -> Block {
    log.allocate(thread, bytes.next_multiple_of(ROUND))
}

pub fn run(log: &mut Log) {
    let mut state = Vec::new();
    for parameters in parameters() {
        // The weights in 16 bits, and the optimizer's copy and two moments in 32.
        for bytes in [2, 4, 4, 4] {
            state.push(allocate(log, MAIN, parameters * bytes));
        }
    }
    while !log.is_long_enough() {
        step(log);
    }
    log.free_backwards(MAIN, state);
}

/// How many parameters each tensor has.
fn parameters() -> Vec<u64> {
    let mut all = vec![WORDS * WIDTH];
    for _ in 0..LAYERS {
        all.extend([
            3 * WIDTH * WIDTH,
            WIDTH * WIDTH,
            4 * WIDTH * WIDTH,
            4 * WIDTH * WIDTH,
        ]);
        all.extend([WIDTH, WIDTH]);
    }
    all
}

/// Forward, backward, and the optimizer.
fn step(log: &mut Log) {
    // Batches are cut to their longest text.
    let tokens = 8 * [128, 160, 192, 256][log.random.below(4) as usize];
    let input = allocate(log, MAIN, tokens * 8);
    let mut kept: Vec<Block> = vec![allocate(log, MAIN, tokens * WIDTH * 2)];
    for _ in 0..LAYERS {
        forward(log, tokens, &mut kept);
        log.work(400);
    }
    let logits = allocate(log, MAIN, tokens * WORDS * 2);
    let loss = allocate(log, MAIN, 4);
    let mut gradients = Vec::new();
    let mut flowing = allocate(log, BACKWARD, tokens * WORDS * 2);
    log.free(BACKWARD, logits);
    let parameters = parameters();
    let mut left = kept.len();
    for layer in (0..LAYERS).rev() {
        for tensor in (0..6).rev() {
            let parameters = parameters[1 + 6 * layer + tensor];
            gradients.push(allocate(log, BACKWARD, parameters * 2));
            // The gradient that flows back gives way to the next one; blocks kept for this tensor are used up.
            let next = allocate(log, BACKWARD, tokens * WIDTH * 2);
            log.free(BACKWARD, std::mem::replace(&mut flowing, next));
            let until = 1 + (left - 1) * (6 * layer + tensor) / (6 * layer + tensor + 1);
            for block in kept.split_off(until).into_iter().rev() {
                log.free(BACKWARD, block);
            }
            left = until;
        }
        log.work(800);
    }
    gradients.push(allocate(log, BACKWARD, parameters[0] * 2));
    log.free(BACKWARD, flowing);
    log.free_backwards(BACKWARD, kept);
    optimize(log, gradients);
    log.free_backwards(MAIN, vec![input, loss]);
    log.work(5000);
}

/// A layer keeps the blocks that its backward pass needs and frees the others.
fn forward(log: &mut Log, tokens: u64, kept: &mut Vec<Block>) {
    let wide = tokens * WIDTH * 2;
    for bytes in [wide, tokens * 8, 3 * wide] {
        kept.push(allocate(log, MAIN, bytes)); // norm, its statistics, q k v
    }
    let workspace = log.random.between(1, 5) << 20;
    let workspace = allocate(log, MAIN, workspace);
    for bytes in [wide, tokens * 16 * 4] {
        kept.push(allocate(log, MAIN, bytes)); // attention, its sums
    }
    log.free(MAIN, workspace);
    let sum = allocate(log, MAIN, wide);
    for bytes in [wide, tokens * 8, 4 * wide, 4 * wide] {
        kept.push(allocate(log, MAIN, bytes)); // norm, its statistics, the wide layer twice
    }
    // A dropout's mask is as long as the batch happens to be.
    let mask = tokens * WIDTH / 8;
    kept.push(allocate(log, MAIN, mask));
    log.free(MAIN, sum);
}

/// A few tensors at a time, through lists of pointers and scratch; then the gradients go.
fn optimize(log: &mut Log, gradients: Vec<Block>) {
    let norm = allocate(log, MAIN, 4 * gradients.len() as u64);
    for chunk in gradients.chunks(16) {
        let list = allocate(log, MAIN, 48 * chunk.len() as u64);
        let scratch = chunk
            .iter()
            .map(|gradient| gradient.bytes)
            .max()
            .unwrap_or(0);
        let scratch = allocate(log, MAIN, scratch);
        log.work(300);
        log.free_backwards(MAIN, vec![list, scratch]);
    }
    log.free(MAIN, norm);
    for gradient in gradients {
        log.free(MAIN, gradient);
    }
}
