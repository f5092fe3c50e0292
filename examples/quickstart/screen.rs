//! How it looks: colours and a moving bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::io::Write;

fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// A text in a colour of the terminal.
pub(crate) fn paint(code: u8, text: &str) -> String {
    match is_terminal() {
        true => format!("\x1b[{code}m{text}\x1b[0m"),
        false => text.to_owned(),
    }
}

pub(crate) fn title(text: &str) {
    println!("\n{}", paint(1, text));
}

/// A progress bar.
pub(crate) struct Bar {
    total: usize,
    drawn: Option<usize>,
}

impl Bar {
    const WIDTH: usize = 40;

    pub(crate) fn new(total: usize) -> Self {
        Self { total, drawn: None }
    }

    /// Shows how far it is, if that has changed.
    pub(crate) fn draw(&mut self, done: usize) {
        // Elsewhere than on a terminal, ten lines are enough.
        let step = match is_terminal() {
            true => done,
            false => done * 10 / self.total.max(1),
        };
        if self.drawn.replace(step) == Some(step) {
            return;
        }
        let filled = (done * Self::WIDTH).checked_div(self.total).unwrap_or(Self::WIDTH);
        let line = format!(
            "   [{}{}] {done}/{}",
            paint(32, &"#".repeat(filled)),
            "-".repeat(Self::WIDTH - filled),
            self.total
        );
        match is_terminal() {
            true if done < self.total => print!("\r{line}"),
            true => println!("\r{line}"),
            false => println!("{line}"),
        }
        // A bar that cannot be drawn is no reason to stop.
        let _ = std::io::stdout().flush();
    }
}
