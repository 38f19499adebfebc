//! A round of load: clients die and stop, connections are cut, services reload and restart.

use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::children::Member;
use crate::hostile::{Arms, Hostile, Target};
use crate::journal::Journal;
use crate::proxy::Proxy;
use crate::service::Service;

/// All that takes part.
pub struct Cast {
    /// Lives from the beginning to the end, and reloads.
    pub steady: Service,
    /// Is restarted again and again, in order and by SIGKILL.
    pub restarted: Service,
    pub members: Vec<Member>,
    pub proxy: Proxy,
    pub arms: Arms,
}

impl Cast {
    /// Runs the load until `until`.
    pub fn load(&mut self, rng: &mut Rng, until: Instant, journal: &Journal) {
        for member in &mut self.members {
            member.load();
        }
        // The metrics' port changes at a restart: hostile peers then knock at a closed one.
        let targets = [Target::of(&self.steady), Target::of(&self.restarted)];
        let seeds = [rng.fork(), rng.fork()];
        let mut restarts = rng.fork();
        let (steady, restarted) = (&mut self.steady, &mut self.restarted);
        let (members, proxy, arms) = (&mut self.members, &self.proxy, &self.arms);
        std::thread::scope(|scope| {
            for rng in seeds {
                let hostile = Hostile { rng, arms, journal };
                scope.spawn(|| hostile.run(&targets, until));
            }
            scope.spawn(|| restart(restarted, &mut restarts, until));
            disturb(members, steady, proxy, rng, until, journal);
        });
    }
}

/// Kills and stops clients, cuts connections, and reloads the service that is not restarted.
fn disturb(
    members: &mut [Member],
    steady: &mut Service,
    proxy: &Proxy,
    rng: &mut Rng,
    until: Instant,
    journal: &Journal,
) {
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(50));
        let one = rng.usize(..members.len());
        match rng.u32(..80) {
            0 => members[one].kill(journal),
            1 => {
                // Longer and shorter than a lease.
                let duration = Duration::from_millis(rng.u64(100..4000));
                members[one].stop(duration, journal);
            }
            2 | 3 => journal.add("connections cut", proxy.cut() as u64),
            4 => steady.reload(rng.choice(["1s", "2s", "wrong"]).expect("three")),
            _ => {}
        }
        for member in &mut *members {
            member.look(journal);
        }
        if !steady.check_alive() {
            return;
        }
    }
}

/// Ends the service in every way, and starts it again.
fn restart(service: &mut Service, rng: &mut Rng, until: Instant) {
    loop {
        let pause = Duration::from_millis(rng.u64(1000..8000));
        let next = Instant::now() + pause;
        while Instant::now() < next.min(until) {
            std::thread::sleep(Duration::from_millis(50));
            if !service.check_alive() {
                return;
            }
        }
        if Instant::now() >= until {
            return;
        }
        match rng.u32(..5) {
            0 | 1 => service.drain(),
            2 => service.end_now(),
            3 => service.kill(),
            _ => {
                service.kill();
                service.stillborn(Duration::from_millis(rng.u64(..200)));
            }
        }
        let policies = ["same-peer", "same-peer", "anyone", "never"];
        service.begin(rng.choice(policies).expect("four"));
    }
}
