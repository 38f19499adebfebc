//! The task that owns a client's connection.
//!
//! One task reads, writes and keeps the time concurrently, so that a slow reader at the other end does not
//! stop this one from reading. When the connection breaks it reconnects, and resumes the session if the
//! server still has it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::{MissedTickBehavior, interval, sleep};

use super::greet::{self, Established};
use super::session::{ClientSession, Commands};
use super::text;
use crate::limits::deadline;
use crate::protocol::{FromServer, decode, encode};
use crate::tls::{Credential, WALL_CLOCK};
use crate::transport::{FrameReader, FrameWriter};
use crate::{Distrust, Error, Result, Security};

/// Runs a session until its last user is gone.
pub(super) async fn run(session: Arc<ClientSession>, mut commands: Commands, first: Established) {
    let mut next = Some(first);
    let why = loop {
        let served = match next.take() {
            Some(established) => serve(&session, &mut commands, established).await,
            None => Ok(()),
        };
        let Err(why) = served else {
            break Error::peer_lost(session.peer(), "this client was closed");
        };
        tracing::debug!(address = %session.dial.options.address, error = %why, "connection broken");
        session.broken(&why);
        if session.dial.options.reconnect.is_never() {
            break why;
        }
        // Otherwise the task would keep it while it reconnects, which may take hours.
        drop(why);
        next = redial(&session).await;
    };
    // Before the queue is dropped, so that its requests get the reason.
    session.over(&why);
}

/// Serves one connection until it breaks; `Ok` when it is no longer needed.
async fn serve(
    session: &Arc<ClientSession>,
    commands: &mut Commands,
    established: Established,
) -> Result<()> {
    let Established {
        mut reader,
        mut writer,
        terms,
        credential,
        ..
    } = established;
    // Leases may have been released meanwhile.
    session.wake.notify_one();
    let done = tokio::select! {
        // Biased: received data is read before the server counts as silent.
        biased;
        broken = read(session, &mut reader) => broken,
        done = write(session, commands, &mut writer, terms.welcome.frame_bytes as usize) => done,
        silent = keep_time(session, terms.heartbeat, terms.lease) => silent,
        changed = watch_trust(session, credential) => Err(changed),
    };
    if done.is_ok() {
        writer.finish().await;
    }
    done
}

async fn read(session: &Arc<ClientSession>, reader: &mut FrameReader) -> Result<()> {
    let limit = session.dial.options.limits.frame_bytes;
    loop {
        let Some(mut frame) = reader.read(limit).await? else {
            return Err(Error::peer_lost(session.peer(), "it closed the connection"));
        };
        session.heard();
        match decode(&frame.bytes).map_err(|error| text::of(&session.peer(), error))? {
            FromServer::Reply(id, answer) => {
                session.answered(id, answer, frame.uncounted_fds())?;
            }
            FromServer::Event(event) => session.notice(event)?,
        }
    }
}

async fn write(
    session: &ClientSession,
    commands: &mut Commands,
    writer: &mut FrameWriter,
    most: usize,
) -> Result<()> {
    loop {
        let own: Vec<_> = std::iter::from_fn(|| session.own())
            .map(|request| encode(&request))
            .collect();
        if !own.is_empty() {
            writer.write_together(&own).await?;
        }
        if session.may_end(session.patience()) {
            return Ok(());
        }
        let command = tokio::select! {
            () = session.wake.notified() => continue,
            command = commands.recv() => command,
        };
        // The session itself has a sender, so there is always one.
        let Some(command) = command else {
            return Ok(());
        };
        let Some((request, fds)) = session.admit(command) else {
            continue;
        };
        let bytes = encode(&request);
        if bytes.len() > most {
            let what = "bytes in a frame that the server reads";
            let limit = most as u64;
            session.unwritten(request.0, Error::LimitReached { what, limit });
            continue;
        }
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        writer.write(&bytes, &fds).await?;
    }
}

/// Pings twice as often as the server requires, and ends when the server is silent.
async fn keep_time(session: &ClientSession, heartbeat: Duration, lease: Duration) -> Result<()> {
    let tick = heartbeat / 2;
    let mut ticks = interval(tick);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Leaves time to reconnect before the leases end.
    let patience = (lease / 2).max(heartbeat);
    loop {
        ticks.tick().await;
        let silent = session.tick(tick);
        if silent > patience {
            let why = format!("not a word for {silent:?}");
            return Err(Error::peer_lost(session.peer(), why));
        }
        // It also wakes the writer, which checks whether closing has taken too long.
        session.ping();
    }
}

/// Waits until the server's certificate is no longer valid, or this process has a new one and no user waits for an
/// answer. Returns why the connection is to end.
async fn watch_trust(session: &ClientSession, server: Option<Credential>) -> Error {
    let (Security::Tls(tls), Some(mut server)) = (&session.dial.options.security, server) else {
        return std::future::pending().await;
    };
    let mut reloads = tls.reloads();
    loop {
        if let Err(why) = tls.check(&mut server, SystemTime::now()) {
            return Error::not_trusted(session.peer(), Distrust::Certificate, why);
        }
        // The server ends the session when the certificate that it has seen expires.
        let renews = !session.dial.options.reconnect.is_never() && tls.is_renewed(&server);
        if renews && !session.is_asking() {
            let why = "this process connects anew with its new certificate";
            return Error::peer_lost(session.peer(), why);
        }
        tokio::select! {
            () = reloads.next() => {}
            // Timers do not run while the machine is suspended.
            () = sleep(WALL_CLOCK) => {}
        }
    }
}

/// Reconnects until there is a connection; `None` when no user needs one.
async fn redial(session: &ClientSession) -> Option<Established> {
    let terms = session.terms();
    let tick = terms.heartbeat / 2;
    let mut attempt = 0;
    let work = async {
        loop {
            sleep(session.dial.options.reconnect.pause(attempt)).await;
            attempt = attempt.saturating_add(1);
            let deadline = deadline(session.dial.options.limits.handshake);
            match greet::establish(&session.dial, Some(session.resume()), deadline).await {
                Ok(established) => return established,
                Err(why) => {
                    let address = &session.dial.options.address;
                    tracing::debug!(%address, error = %why.error, "not connected");
                    session.still_down(why);
                }
            }
        }
    };
    tokio::pin!(work);
    let mut ticks = interval(tick);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            established = &mut work => {
                session.resumed(&established);
                return Some(established);
            }
            _ = ticks.tick() => {
                session.tick(tick);
            }
            () = session.wake.notified() => {}
        }
        if session.may_end(terms.lease) {
            return None;
        }
    }
}
