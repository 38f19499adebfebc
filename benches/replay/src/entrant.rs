//! The contestants by name, and the work of each.

use egmem::{Error, Result};

use super::heap::Ground;
use super::play::{self, Facts, Script, Sight};
use super::report::Outcome;
use super::threads::Cast;
use egmem_replay::contestants::{Contestant, Kind, Room, Shared, SharedVisitor, Visitor};

/// An allocator that takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entrant {
    /// egmem's.
    Heap,
    /// One to compare with.
    Other(Kind),
}

/// The settings of all entrants.
pub struct Setting {
    /// For those that manage a range.
    pub room: Room,
    /// How often they replay, besides the first time.
    pub repeat: u32,
    /// If by many threads.
    pub threads: Option<Cast>,
    /// Where heaps are made, if one takes part.
    pub ground: Option<Ground>,
    /// The heading of the heap's picture, if one is wanted.
    pub picture: Option<String>,
}

impl Entrant {
    /// All that this build has.
    pub fn all() -> Vec<Self> {
        let others = Kind::available().into_iter().map(Self::Other);
        std::iter::once(Self::Heap).chain(others).collect()
    }

    /// Its name on the command line and in tables.
    pub fn name(self) -> String {
        match self {
            Self::Heap => "heap".into(),
            Self::Other(kind) => {
                let words = kind.name().split([' ', ',']);
                let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
                words.join("-")
            }
        }
    }

    /// Those with these names; all for none.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a name that this build does not have.
    pub fn choose(names: &[String]) -> Result<Vec<Self>> {
        let all = Self::all();
        if names.is_empty() {
            return Ok(all);
        }
        let find = |name: &String| {
            let found = all.iter().find(|entrant| entrant.name() == name.trim());
            found.copied().ok_or_else(|| {
                let names: Vec<String> = all.iter().map(|entrant| entrant.name()).collect();
                let why = format!("{name:?} is not in this build");
                Error::invalid_of("allocator", why, names.join(", "))
            })
        };
        names.iter().map(find).collect()
    }

    /// Replays the script.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn replay(self, script: &Script, setting: &Setting) -> Result<Outcome> {
        match (self, &setting.ground) {
            (Self::Heap, Some(ground)) => replay_heap(ground, script, setting),
            (Self::Heap, None) => Err(Error::invalid(
                "allocator",
                "there is no driver for the heap",
            )),
            (Self::Other(kind), _) => {
                let refused =
                    |error| Error::system(format!("{} cannot be made", self.name()), &error);
                let room = setting.room;
                let facts = kind.with(room, Observe(script)).map_err(refused)?;
                let times = match &setting.threads {
                    None => kind.with(room, Time(script, setting.repeat)),
                    Some(cast) => kind.with_shared(room, Time(cast, setting.repeat)),
                };
                let times = times.map_err(refused)?;
                let bounded = kind.is_bounded();
                Ok(Outcome::new(self.name(), bounded, facts, &times, script))
            }
        }
    }
}

fn replay_heap(ground: &Ground, script: &Script, setting: &Setting) -> Result<Outcome> {
    let mut heap = ground.heap(setting.room)?;
    let mut picture = None;
    let facts = play::observe(&mut heap, script, |heap, at_peak| {
        if let (true, Some(title)) = (at_peak, &setting.picture) {
            picture = Some(heap.picture(title));
        }
        heap.sight()
    });
    let refused = heap.refused().map(Error::to_string);
    // Its memory goes before the next one takes its own.
    drop(heap);
    let heap = ground.heap(setting.room)?;
    let times = match &setting.threads {
        None => Visitor::visit(Time(script, setting.repeat), heap),
        Some(cast) => SharedVisitor::visit(Time(cast, setting.repeat), heap),
    };
    let mut outcome = Outcome::new(Entrant::Heap.name(), true, facts, &times, script);
    outcome.refused = refused;
    outcome.picture = picture;
    Ok(outcome)
}

struct Observe<'a>(&'a Script<'a>);

impl Visitor for Observe<'_> {
    type Output = Facts;
    fn visit<C: Contestant + Send + 'static>(self, mut contestant: C) -> Facts {
        play::observe(&mut contestant, self.0, |_, _| Sight::default())
    }
}

/// The trace to replay, and how often besides the first time.
struct Time<W>(W, u32);

impl Visitor for Time<&Script<'_>> {
    type Output = Vec<f64>;
    fn visit<C: Contestant + Send + 'static>(self, mut contestant: C) -> Vec<f64> {
        (0..=self.1)
            .map(|_| play::time(&mut contestant, self.0).as_nanos() as f64)
            .collect()
    }
}

impl SharedVisitor for Time<&Cast> {
    type Output = Vec<f64>;
    fn visit<S: Shared + Send + 'static>(self, contestant: S) -> Vec<f64> {
        (0..=self.1)
            .map(|_| self.0.time(&contestant).as_nanos() as f64)
            .collect()
    }
}
