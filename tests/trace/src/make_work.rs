//! The generator's streams, events and work.

use super::addr::{Addr, Memory};
use super::model::{Block, Event, Kind, Model, NOBODY, UNIT};
use super::op::Op;

impl Model {
    pub(super) fn next_stream(&mut self) {
        let streams = self.streams.clone();
        let events = self.events.clone();
        match self.random.below(22) {
            0..3 if streams.len() < 4 => {
                let out = self.slot(Kind::Stream);
                let good = self.random.percent(75);
                let device = match good {
                    true => self.device(),
                    false => self.random.pick(&[NOBODY, -1]),
                };
                self.ops.push(Op::StreamCreate { out, device });
                if good {
                    self.streams.push(out);
                }
            }
            3 => match self.random.some(&streams) {
                Some(stream) => {
                    self.streams.retain(|s| *s != stream);
                    self.ops.push(Op::StreamDestroy { stream });
                }
                None => self.plain(),
            },
            4 => {
                let stream = self.stream();
                self.ops.push(Op::StreamSynchronize { stream });
            }
            5 => {
                let stream = self.stream();
                self.ops.push(Op::StreamQuery { stream });
            }
            6..9 if events.len() < 5 => {
                let out = self.slot(Kind::Event);
                let good = self.random.percent(85);
                let device = if good { 0 } else { NOBODY };
                let timing = self.random.percent(65);
                self.ops.push(Op::EventCreate {
                    out,
                    device,
                    timing,
                });
                if good {
                    let recorded = self.random.percent(60);
                    if recorded {
                        let stream = self.stream();
                        self.ops.push(Op::EventRecord { event: out, stream });
                    }
                    self.events.push(Event {
                        slot: out,
                        timing,
                        recorded,
                    });
                }
            }
            9..18 => match self.random.some(&events) {
                Some(event) => self.next_event(event),
                None => self.plain(),
            },
            _ => self.plain(),
        }
    }

    fn next_event(&mut self, event: Event) {
        let slot = event.slot;
        match self.random.below(10) {
            0..3 => {
                let stream = self.stream();
                self.ops.push(Op::EventRecord {
                    event: slot,
                    stream,
                });
                if let Some(event) = self.events.iter_mut().find(|e| e.slot == slot) {
                    event.recorded = true;
                }
            }
            3 => {
                let stream = self.stream();
                self.ops.push(Op::StreamWaitEvent {
                    stream,
                    event: slot,
                });
            }
            4 => self.ops.push(Op::EventSynchronize { event: slot }),
            5 => self.ops.push(Op::EventQuery { event: slot }),
            6 => {
                self.events.retain(|e| e.slot != slot);
                self.ops.push(Op::EventDestroy { event: slot });
            }
            _ => {
                let good = |e: &&Event| e.timing && e.recorded;
                let events = match self.random.percent(60) {
                    true => self.events.iter().filter(good).copied().collect(),
                    false => self.events.clone(),
                };
                let start = self.random.some(&events).map_or(slot, |e| e.slot);
                let end = self.random.some(&events).map_or(slot, |e| e.slot);
                self.ops.push(Op::EventElapsed { start, end });
            }
        }
    }

    /// `cuMemAlloc` and `cuMemHostAlloc`.
    fn plain(&mut self) {
        let plain: Vec<_> = self
            .blocks
            .iter()
            .filter_map(|block| match block.at.of {
                Memory::Plain(slot) => Some(slot),
                _ => None,
            })
            .collect();
        if plain.len() >= 3 || self.random.percent(35) {
            let Some(plain) = self.random.some(&plain) else {
                return;
            };
            self.blocks
                .retain(|block| block.at.of != Memory::Plain(plain));
            let twice = self.random.percent(30);
            return self.ops.push(Op::FreePlain { plain, twice });
        }
        let out = self.slot(Kind::Plain);
        let (device, size, good) = match self.random.below(8) {
            0 => (NOBODY, UNIT, false),
            1 => (0, 0, false),
            2 => (0, 64 << 40, false),
            _ => (0, 4096 * (1 + self.random.below(1024)), true),
        };
        let host = self.random.percent(50);
        self.ops.push(match host {
            true => Op::HostAlloc { out, device, size },
            false => Op::Alloc { out, device, size },
        });
        if good {
            self.blocks.push(Block {
                at: Addr {
                    of: Memory::Plain(out),
                    offset: 0,
                },
                size,
                pool: None,
                device: true,
                host,
            });
        }
    }

    pub(super) fn next_work(&mut self) {
        let Some((at, size, device, host)) = self.granted() else {
            return self.plain();
        };
        let stream = self.stream();
        // An even part of the memory, up to 256 KiB, aligned to words.
        let words = (size / 8).min(1 + self.random.below(32 << 10));
        let room = size / 8 - words;
        let offset = at.offset + 8 * self.random.below(room + 1);
        let at = Addr { offset, ..at };
        let bytes = words * 8 - self.random.below(8);
        let seed = self.random.below(4);
        let threads = match self.random.percent(85) {
            true => self.random.pick(&[32, 128, 256, 1024]),
            false => self.random.pick(&[0, 2048]),
        };
        let null = Addr {
            of: Memory::Nowhere,
            offset: 0,
        };
        let choice = self.random.below(12);
        if !device || (host && choice < 4) {
            self.ops.push(match host && self.random.percent(50) {
                true => Op::CpuWrite { at, words, seed },
                false => Op::CpuRead { at, words },
            });
            return;
        }
        let op = match choice {
            0..6 => {
                let at = if self.random.percent(20) { null } else { at };
                if self.random.percent(45) {
                    let value = self.random.word() as u8;
                    let bytes = self.random.pick(&[bytes, bytes, 0]);
                    Op::Memset {
                        at,
                        value,
                        bytes,
                        stream,
                    }
                } else {
                    let other = match self.granted() {
                        Some((src, size, true, _)) if src.of != at.of => Some((src, size)),
                        _ => None,
                    };
                    let Some((src, size)) = other else {
                        return self.ops.push(Op::ReadKernel {
                            at,
                            words,
                            threads,
                            stream,
                        });
                    };
                    Op::Memcpy {
                        dst: at,
                        src: if self.random.percent(8) { null } else { src },
                        bytes: bytes.min(size),
                        stream,
                    }
                }
            }
            6..8 => Op::WriteKernel {
                at,
                words,
                seed,
                threads,
                stream,
            },
            8..10 => {
                // First the pattern that the check will read.
                let expected = self.random.pick(&[seed, seed, 9]);
                self.ops.push(Op::WriteKernel {
                    at,
                    words,
                    seed,
                    threads: 256,
                    stream,
                });
                Op::CheckKernel {
                    at,
                    words,
                    expected,
                    seed: seed + 1,
                    threads,
                    stream,
                }
            }
            _ => Op::ReadKernel {
                at,
                words,
                threads,
                stream,
            },
        };
        self.ops.push(op);
        if host {
            self.ops.push(Op::CpuRead { at, words });
        }
    }
}
