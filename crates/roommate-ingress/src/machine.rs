//! The front as a tenant: it reports what was served and obeys the machine.

use crate::front::{Front, Phase};
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use std::io;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::time::{sleep, timeout};

/// Version of the protocol.
const VERSION: u32 = 1;
/// How long a window is, where there are requests and where there are none.
const WINDOW: Duration = Duration::from_millis(100);
const QUIET_WINDOW: Duration = Duration::from_secs(1);
/// The shortest window, where the pressure is high.
const URGENT_WINDOW: Duration = Duration::from_millis(10);
/// Pause before a connection is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// Messages of the machine that concern a service; others are ignored.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Heard {
    Welcome(Box<RawValue>),
    Tune(Box<RawValue>),
    Suspend {},
    Resume {},
    Stop {},
    Refused {
        reason: String,
    },
    #[serde(other, deserialize_with = "ignored")]
    Other,
}

fn ignored<'de, D: serde::Deserializer<'de>>(from: D) -> Result<(), D::Error> {
    serde::de::IgnoredAny::deserialize(from).map(|_| ())
}

#[derive(Deserialize)]
struct Orders {
    #[serde(default)]
    batch: u32,
    #[serde(default)]
    fill_us: u32,
    #[serde(default)]
    shared: bool,
    #[serde(default)]
    suspended: bool,
}

/// Speaks with the machine as long as the front runs. Without a machine it only measures.
pub(crate) async fn speak(front: &Front) {
    let variable = |name| std::env::var(name).ok().filter(|v| !v.is_empty());
    let (Some(socket), Some(token)) = (variable("ROOMMATE_SOCKET"), variable("ROOMMATE_TOKEN"))
    else {
        return;
    };
    loop {
        if let Err(why) = connection(front, &socket, &token).await {
            // A machine that restarts is back in a moment.
            if why.kind() == io::ErrorKind::PermissionDenied {
                crate::say(&why.to_string());
            }
        }
        sleep(AGAIN).await;
    }
}

async fn connection(front: &Front, socket: &str, token: &str) -> io::Result<()> {
    let (from, mut to) = UnixStream::connect(socket).await?.into_split();
    let most = front.spec.max_batch;
    let hello = json!({ "hello": {
        "version": VERSION, "token": token, "pid": std::process::id(),
        "batch": { "size": most, "min": 1, "max": most }
    }});
    send(&mut to, &hello).await?;
    let mut lines = BufReader::new(from).lines();
    let mut last = Instant::now();
    let mut told_suspended = false;
    loop {
        tokio::select! {
            line = lines.next_line() => match line? {
                Some(line) => obey(front, &line)?,
                None => return Ok(()),
            },
            () = idle(front), if front.suspended.get() && !told_suspended => {
                told_suspended = true;
                send(&mut to, &json!({ "suspended": { "done": 0.0 } })).await?;
            }
            () = window(front, last) => {
                last = Instant::now();
                let queued = front.queue.borrow().len();
                let held = front.gate.borrow_mut().take_held(last);
                let served = front.stats.borrow_mut().take(last, queued, held, front.is_ready());
                send(&mut to, &json!({ "served": served })).await?;
            }
        }
        if told_suspended && !front.suspended.get() {
            told_suspended = false;
            send(&mut to, &json!({ "resumed": {} })).await?;
        }
    }
}

/// Waits until what was accepted is answered.
async fn idle(front: &Front) {
    while !front.is_idle() {
        sleep(Duration::from_millis(5)).await;
    }
}

/// Waits for the end of a window that began then.
async fn window(front: &Front, began: Instant) {
    sleep(URGENT_WINDOW.saturating_sub(began.elapsed())).await;
    let _ = timeout(WINDOW.saturating_sub(began.elapsed()), front.urgent.notified()).await;
    while front.stats.borrow().is_idle() && began.elapsed() < QUIET_WINDOW {
        let _ = timeout(WINDOW, front.urgent.notified()).await;
        if front.phase.get() == Phase::Ready && began.elapsed() < WINDOW {
            break;
        }
    }
}

async fn send(to: &mut OwnedWriteHalf, message: &serde_json::Value) -> io::Result<()> {
    let line = message.to_string() + "\n";
    let sent = timeout(Duration::from_secs(10), to.write_all(line.as_bytes())).await;
    sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

fn obey(front: &Front, line: &str) -> io::Result<()> {
    let heard: Heard = serde_json::from_str(line)?;
    match heard {
        Heard::Welcome(orders) => {
            let suspended = serde_json::from_str::<Orders>(orders.get())?.suspended;
            front.suspended.set(suspended);
            tune(front, orders)?;
        }
        Heard::Tune(orders) => tune(front, orders)?,
        Heard::Suspend {} => front.suspended.set(true),
        Heard::Resume {} => front.suspended.set(false),
        Heard::Stop {} => front.drain(),
        Heard::Refused { reason } => {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        Heard::Other => {}
    }
    Ok(())
}

fn tune(front: &Front, orders: Box<RawValue>) -> io::Result<()> {
    let Orders { batch, fill_us, shared, .. } = serde_json::from_str(orders.get())?;
    let most = if batch > 0 { batch.min(front.spec.max_batch) } else { front.spec.max_batch };
    let worker = front.ready.borrow().max_batch.unwrap_or(most).max(1);
    let rules = &mut front.queue.borrow_mut().rules;
    rules.max_batch = most.min(worker).into();
    rules.roommates = shared;
    let ordered = (fill_us > 0).then(|| Duration::from_micros(fill_us.into()));
    rules.fill = ordered.or(front.spec.fill());
    *front.tune.borrow_mut() = Some(orders);
    front.changed.notify_one();
    Ok(())
}
