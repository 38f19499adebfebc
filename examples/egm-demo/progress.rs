//! Progress on a terminal: on standard error, and only if that is a terminal.

use std::io::IsTerminal;

use egmem::Explained;
use egmem::doctor::measure::Step;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar of `steps` steps that goes away when it is done.
pub fn bar(steps: u64) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(steps), target);
    if let Ok(style) = ProgressStyle::with_template("{bar:32} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    bar
}

/// Shows a measurement's steps on a bar, and what it could not do beside it.
pub fn tell(bar: &ProgressBar) -> impl FnMut(Step<'_>) {
    move |step| match step {
        Step::Doing(text) => bar.set_message(text.to_owned()),
        Step::Done => bar.inc(1),
        Step::Without(what, error) => {
            bar.suspend(|| eprintln!("egm-demo: without {what}: {}", Explained(error)));
        }
    }
}
