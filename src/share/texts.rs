//! Sends texts of the program's own over a channel.

use super::Channel;
use super::frame::{Body, MAX_FRAME};
use crate::Result;

/// The most bytes of a piece: escapes and the frame's other fields have room.
const PIECE: usize = MAX_FRAME / 2;

impl Channel {
    /// Sends a text to the other process, in pieces of at most half a MiB.
    ///
    /// # Errors
    /// As [`send`](Self::send). All pieces together have the channel's time limit.
    pub fn send_text(&mut self, text: &str) -> Result<()> {
        self.as_one(|channel| channel.send_pieces(text))
    }

    fn send_pieces(&mut self, text: &str) -> Result<()> {
        let mut rest = text;
        loop {
            let mut end = rest.len().min(PIECE);
            while !rest.is_char_boundary(end) {
                end -= 1;
            }
            let (piece, behind) = rest.split_at(end);
            let more = !behind.is_empty();
            let text = piece.to_owned();
            self.send_body(&Body::Text { text, more }, &[])?;
            if !more {
                return Ok(());
            }
            rest = behind;
        }
    }

    /// Waits for a text of at most `most` bytes from the other process.
    ///
    /// # Errors
    /// As [`receive`](Self::receive); [`Protocol`](crate::Error::Protocol) for a longer text, and for one that comes in more
    /// pieces than it needs. All pieces together have the channel's time limit.
    pub fn receive_text(&mut self, most: usize) -> Result<String> {
        self.as_one(|channel| channel.receive_pieces(most))
    }

    fn receive_pieces(&mut self, most: usize) -> Result<String> {
        let mut all = String::new();
        loop {
            let (text, more) = match self.receive_body()? {
                (Body::Text { text, more }, _) => (text, more),
                (other, _) => return Err(self.unexpected(&other)),
            };
            // A piece is short only at a text's end.
            let is_short = more && text.len() < PIECE - 3;
            if is_short || text.len() > most - all.len() {
                return Err(self.refuse(format!("a text of more than {most} bytes")));
            }
            all.push_str(&text);
            if !more {
                return Ok(all);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::{Error, Peers};

    fn pair() -> (Channel, Channel) {
        let (one, other) = UnixStream::pair().unwrap();
        let channel = |stream| Channel::new(stream, &Peers::same_user()).unwrap();
        (channel(one), channel(other))
    }

    fn through(text: &str, most: usize) -> Result<String> {
        let (mut one, mut other) = pair();
        std::thread::scope(|scope| {
            // A receiver that refuses closes the connection.
            scope.spawn(move || drop(one.send_text(text)));
            other.receive_text(most)
        })
    }

    #[test]
    fn texts_of_any_length_arrive_whole() {
        for bytes in [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE] {
            let text = "x".repeat(bytes);
            assert_eq!(through(&text, bytes).unwrap(), text);
        }
        let odd = "x".to_owned() + &"ä".repeat(PIECE);
        assert_eq!(through(&odd, odd.len()).unwrap(), odd);
    }

    #[test]
    fn longer_texts_are_refused() {
        for most in [0, PIECE, 2 * PIECE] {
            let error = through(&"x".repeat(most + 1), most).unwrap_err();
            assert!(matches!(error, Error::Protocol { .. }), "{error}");
        }
    }

    #[test]
    fn all_pieces_have_one_time_limit() {
        use std::time::Duration;

        let (mut one, mut other) = pair();
        other.set_timeout(Duration::from_millis(300));
        let sender = std::thread::spawn(move || {
            let piece = Body::Text {
                text: "x".repeat(PIECE),
                more: true,
            };
            while one.send_body(&piece, &[]).is_ok() {
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let error = other.receive_text(30 * PIECE).unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
        drop(other);
        sender.join().unwrap();
    }

    #[test]
    fn endless_small_pieces_are_refused() {
        let (mut one, mut other) = pair();
        let piece = Body::Text {
            text: String::new(),
            more: true,
        };
        one.send_body(&piece, &[]).unwrap();
        let error = other.receive_text(10).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
    }
}
