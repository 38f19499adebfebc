//! LLM inference: requests come and go, and each holds pages of a KV cache, more as its text grows.

use super::{Block, Log};

/// A page: 16 tokens at 128 KiB each, as a model of 32 layers with 8 heads of 128 in 16 bits has them.
const PAGE: u64 = 2 << 20;
const TOKENS: u64 = 16;
/// The pages that the server may hold; beyond them it puts a request off.
const PAGES: usize = 400;
/// Requests that run together at most.
const BATCH: usize = 16;
/// The width of the model in bytes for one token's activation.
const WIDTH: u64 = 4096 * 2;

/// The thread that computes, and the one that answers and then frees a request's pages.
const ENGINE: u32 = 1;
const ANSWERS: u32 = 2;

struct Request {
    pages: Vec<Block>,
    tokens: u64,
    until: u64,
    /// Its other state: block table, sampling state.
    state: Vec<Block>,
}

pub fn run(log: &mut Log) {
    let mut running: Vec<Request> = Vec::new();
    // Which the last steps were written to, as graphs that are replayed expect them.
    let logits = log.allocate(ENGINE, BATCH as u64 * 32_000 * 4);
    while !log.is_long_enough() {
        let held: usize = running.iter().map(|request| request.pages.len()).sum();
        if running.len() < BATCH && held < PAGES * 3 / 4 && log.random.percent(40) {
            running.push(start(log));
        }
        step(log, &mut running);
    }
    for request in running {
        end(log, request);
    }
    log.free(ENGINE, logits);
}

/// Reads a prompt: all its pages at once, and scratch in proportion to it.
fn start(log: &mut Log) -> Request {
    // Mostly short prompts, a few long ones.
    let tokens = match log.random.percent(15) {
        true => log.random.between(512, 1536),
        false => log.random.spread(5, 9),
    };
    let until = tokens + log.random.spread(4, 9);
    let table = log.allocate(ENGINE, 8 * until.div_ceil(TOKENS));
    let state = log.allocate(ENGINE, 64);
    let pages = (0..tokens.div_ceil(TOKENS))
        .map(|_| log.allocate(ENGINE, PAGE))
        .collect();
    let attention = log.allocate(ENGINE, tokens * WIDTH * 3);
    let output = log.allocate(ENGINE, tokens * WIDTH);
    log.work(900);
    log.free(ENGINE, attention);
    let wide = log.allocate(ENGINE, tokens * WIDTH * 7 / 2);
    log.work(900);
    log.free_backwards(ENGINE, vec![output, wide]);
    Request {
        pages,
        tokens,
        until,
        state: vec![table, state],
    }
}

/// One more token for each request.
fn step(log: &mut Log, running: &mut Vec<Request>) {
    if running.is_empty() {
        return log.work(2000);
    }
    let batch = running.len() as u64;
    let scratch =
        [WIDTH * 3, WIDTH * 7 / 2, 4 * 1024].map(|each| log.allocate(ENGINE, each * batch));
    // Tokens come one by one; the step stands for as many as bring some requests to a page's end.
    let tokens = 1 + log.random.below(TOKENS / 2);
    let mut index = 0;
    while index < running.len() {
        let request = &mut running[index];
        request.tokens += tokens;
        while (request.pages.len() as u64) < request.tokens.min(request.until).div_ceil(TOKENS) {
            request.pages.push(log.allocate(ENGINE, PAGE));
        }
        if request.tokens >= request.until {
            let done = running.swap_remove(index);
            end(log, done);
        } else {
            index += 1;
        }
    }
    log.work(300);
    log.free_backwards(ENGINE, scratch.into());
    // Out of pages: the youngest loses its own and starts anew later.
    while running
        .iter()
        .map(|request| request.pages.len())
        .sum::<usize>()
        > PAGES
    {
        if let Some(youngest) = running.pop() {
            end(log, youngest);
        }
    }
}

fn end(log: &mut Log, request: Request) {
    for page in request.pages {
        log.free(ANSWERS, page);
    }
    log.free_backwards(ENGINE, request.state);
}
