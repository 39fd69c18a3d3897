//! The worker: it is started, restarted when it dies or hangs, and given batches.

use crate::frame::{self, Batch, Done, FromWorker, Ready, ToWorker};
use crate::front::{Answer, Content, Front, Phase, Refusal, Request};
use crate::queue::{self, Waiting};
use crate::shared::{self, Shared};
use crate::stats::End;
use crate::tensor::{Form, Tensor};
use bytes::Bytes;
use serde_json::value::RawValue;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::time::{sleep, sleep_until, timeout};

/// Crashes within a minute after which the front gives up, so that the machine decides.
const MOST_CRASHES: usize = 5;
const MINUTE: Duration = Duration::from_secs(60);
/// Pause before a restart, doubled with each crash of the last minute.
const PAUSE: Duration = Duration::from_millis(200);
/// The shortest time after which a batch counts as hanging.
const HANGS: Duration = Duration::from_secs(5);
/// How long a worker may take to end when it is asked to.
const LEAVES: Duration = Duration::from_secs(3);

/// How a worker ended.
pub(crate) enum Ended {
    /// It was asked to.
    Drained,
    /// It died, or was killed because it did not answer.
    Died(String),
}

/// Crashes of the last minute.
#[derive(Default)]
pub(crate) struct Crashes(Vec<Instant>);

impl Crashes {
    /// Counts one; the pause before the next start, or `None` if there were too many.
    pub(crate) fn another(&mut self, now: Instant) -> Option<Duration> {
        self.0.retain(|at| now.duration_since(*at) < MINUTE);
        self.0.push(now);
        let crashes = self.0.len();
        (crashes < MOST_CRASHES).then(|| PAUSE * 2_u32.pow(crashes as u32 - 1))
    }
}

/// Starts the worker with these additional variables.
pub(crate) fn spawn(words: &[String], env: &[(&str, String)]) -> io::Result<Child> {
    let (program, args) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = std::process::Command::new(program);
    command.args(args).stdin(Stdio::null()).env_remove("ROOMMATE_TOKEN");
    command.envs(env.iter().map(|(name, value)| (name, value)));
    // A group of its own: the signal that ends the front lets it drain the worker first.
    command.process_group(0);
    Command::from(command).kill_on_drop(true).spawn()
}

/// Ends a worker: politely first.
pub(crate) async fn end(child: &mut Child) {
    if let Some(pid) = child.id().and_then(|id| rustix::process::Pid::from_raw(id as i32)) {
        let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::TERM);
    }
    if timeout(LEAVES, child.wait()).await.is_err() {
        kill(child).await;
    }
}

/// Kills a worker with what it started.
pub(crate) async fn kill(child: &mut Child) {
    if let Some(pid) = child.id().and_then(|id| rustix::process::Pid::from_raw(id as i32)) {
        let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
    }
    let _ = child.kill().await;
}

/// Keeps a worker with the SDK running until the service is drained. The error says why it could
/// not be kept.
pub(crate) async fn keep(front: &Front, words: &[String]) -> Result<(), String> {
    let folder = Folder::new().map_err(|e| format!("could not create a folder: {e}"))?;
    let path = folder.0.join("serve.sock");
    let listener = UnixListener::bind(&path).map_err(|e| format!("could not listen: {e}"))?;
    let shared = Shared::new();
    let mut env = vec![("ROOMMATE_SERVE", path.to_string_lossy().into_owned())];
    let place = shared.as_ref().map(|s| s.folder().to_string_lossy().into_owned());
    env.extend(place.map(|place| ("ROOMMATE_SERVE_SHARED", place)));
    let mut crashes = Crashes::default();
    loop {
        let ended = match spawn(words, &env) {
            Ok(child) => attempt(front, &listener, shared.as_ref(), child).await,
            Err(e) => Ended::Died(format!("could not start {:?}: {e}", words.first())),
        };
        let why = match ended {
            Ended::Drained => return Ok(()),
            Ended::Died(why) => why,
        };
        if front.phase.get() == Phase::Ready {
            front.phase.set(Phase::Restarting);
        }
        front.stats.borrow_mut().restarts += 1;
        crate::say(&why);
        let Some(pause) = crashes.another(Instant::now()) else {
            return Err(format!("{MOST_CRASHES} crashes within a minute; the last: {why}"));
        };
        let until = Instant::now() + pause;
        while Instant::now() < until && front.phase.get() != Phase::Draining {
            sleep(Duration::from_millis(20)).await;
            front.give_up();
        }
        if front.phase.get() == Phase::Draining {
            return Ok(());
        }
    }
}

/// A name for a folder that nobody guesses.
pub(crate) fn random_name() -> String {
    let mut bytes = [0; 8];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    format!("roommate-{:016x}", u64::from_le_bytes(bytes))
}

/// A folder that only this user can enter, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> io::Result<Self> {
        let path = std::env::temp_dir().join(random_name());
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// One life of a worker.
async fn attempt(
    front: &Front,
    listener: &UnixListener,
    shared: Option<&Shared>,
    mut child: Child,
) -> Ended {
    let connected = async {
        let (mut stream, _) = listener.accept().await?;
        match frame::read(&mut stream).await? {
            (FromWorker::Ready(ready), _) => Ok((stream, ready)),
            _ => Err(io::Error::other("its first message is not `ready`")),
        }
    };
    let (stream, ready) = tokio::select! {
        connected = connected => match connected {
            Ok(connected) => connected,
            Err(e) => {
                kill(&mut child).await;
                return Ended::Died(format!("the worker did not connect: {e}"));
            }
        },
        status = child.wait() => return Ended::Died(exit("worker", status)),
        () = draining(front) => {
            end(&mut child).await;
            return Ended::Drained;
        }
    };
    let inputs = shared.filter(|_| ready.shared);
    become_ready(front, ready);
    let ended = converse(front, stream, (shared, inputs), &mut child).await;
    match &ended {
        Ended::Drained => {
            if timeout(LEAVES, child.wait()).await.is_err() {
                end(&mut child).await;
            }
        }
        Ended::Died(_) => kill(&mut child).await,
    }
    ended
}

fn become_ready(front: &Front, ready: Ready) {
    let most = ready.max_batch.unwrap_or(front.spec.max_batch).min(front.spec.max_batch).max(1);
    front.queue.borrow_mut().rules.max_batch = most.into();
    *front.ready.borrow_mut() = ready;
    if front.phase.get() != Phase::Draining {
        front.phase.set(Phase::Ready);
    }
    front.urgent.notify_one();
}

/// How a worker or a server ended, in words.
pub(crate) fn exit(what: &str, status: io::Result<ExitStatus>) -> String {
    status.map_or_else(|e| format!("the {what}: {e}"), |s| format!("the {what} ended: {s}"))
}

async fn draining(front: &Front) {
    while front.phase.get() != Phase::Draining {
        sleep(Duration::from_millis(50)).await;
    }
}

/// Requests in work.
struct InWork {
    id: u64,
    rows: u64,
    sent: Instant,
    hangs: Instant,
    requests: Vec<Waiting<Request>>,
}

/// Gives the worker batches until it ends. `inputs`: shared memory, if the worker takes inputs from
/// it.
async fn converse(
    front: &Front,
    stream: UnixStream,
    (shared, inputs): (Option<&Shared>, Option<&Shared>),
    child: &mut Child,
) -> Ended {
    let (mut from, mut to) = stream.into_split();
    // Reading must not be interrupted within a frame, so it has a task of its own.
    let (heard, mut hears) = mpsc::channel(2);
    let reader = tokio::task::spawn_local(async move {
        loop {
            let frame = frame::read(&mut from).await;
            let over = frame.is_err();
            if heard.send(frame).await.is_err() || over {
                return;
            }
        }
    });
    let mut work: Option<InWork> = None;
    let mut ids = 0;
    let mut told = None;
    let why = loop {
        if let Some(orders) = changed_orders(front, &mut told)
            && let Err(e) = frame::write(&mut to, &ToWorker::Tune(&orders), &[]).await
        {
            break format!("the worker does not read: {e}");
        }
        if work.is_none() {
            front.give_up();
            let batch = front.queue.borrow_mut().next(Instant::now(), fits);
            if let Some(batch) = batch {
                ids += 1;
                let (begun, data, forms) = begin(front, ids, batch);
                let large = data.iter().map(Bytes::len).sum::<usize>() >= shared::LARGE;
                let elsewhere = inputs.filter(|_| large);
                let elsewhere = elsewhere.is_some_and(|s| s.write(&forms, &data).is_ok());
                let pieces: Vec<&Bytes> =
                    if elsewhere { Vec::new() } else { data.iter().collect() };
                let message =
                    ToWorker::Batch(Batch { shared: elsewhere, ..message(&begun, forms) });
                let sent = timeout(HANGS, frame::write(&mut to, &message, &pieces)).await;
                drop(message);
                work = Some(begun);
                match sent {
                    Ok(Ok(())) => {}
                    Ok(Err(e)) => break format!("the worker does not read: {e}"),
                    Err(_) => break "the worker does not read".into(),
                }
            } else if front.phase.get() == Phase::Draining && front.queue.borrow().is_empty() {
                let _ = frame::write(&mut to, &ToWorker::Drain {}, &[]).await;
                reader.abort();
                return Ended::Drained;
            }
        }
        let due = match &work {
            Some(work) => work.hangs,
            None => front
                .queue
                .borrow()
                .due(Instant::now(), &fits)
                .unwrap_or_else(|| Instant::now() + Duration::from_secs(1)),
        };
        tokio::select! {
            biased;
            heard = hears.recv() => match heard {
                Some(Ok((message, data))) => match take(front, work.take(), message, &data, shared) {
                    Ok(()) => {}
                    Err((left, why)) => {
                        work = left;
                        break why;
                    }
                },
                Some(Err(e)) => break format!("the worker closed its connection: {e}"),
                None => break "the worker closed its connection".into(),
            },
            status = child.wait() => break exit("worker", status),
            () = front.changed.notified() => {}
            () = sleep_until(due.into()) => {
                if work.as_ref().is_some_and(|w| Instant::now() >= w.hangs) {
                    break "the worker hangs and is killed".into();
                }
            }
        }
    };
    reader.abort();
    front.work_is_lost();
    if let Some(work) = work {
        front.queue.borrow_mut().put_back(work.requests);
        front.give_up();
    }
    if front.phase.get() == Phase::Draining && front.is_idle() {
        return Ended::Drained;
    }
    Ended::Died(why)
}

fn changed_orders(front: &Front, told: &mut Option<Box<RawValue>>) -> Option<Box<RawValue>> {
    let orders = front.tune.borrow();
    let same = match (&*orders, &*told) {
        (Some(a), Some(b)) => a.get() == b.get(),
        (None, _) => true,
        (Some(_), None) => false,
    };
    if same {
        return None;
    }
    told.clone_from(&orders);
    orders.clone()
}

fn fits(a: &Request, b: &Request) -> bool {
    match (&a.content, &b.content) {
        (Content::Tensors(a), Content::Tensors(b)) => a.fits(b),
        (Content::Json(_), Content::Json(_)) => true,
        _ => false,
    }
}

/// A batch is about to be sent: what is in work, its data, and the forms of its inputs.
fn begin(
    front: &Front,
    id: u64,
    requests: Vec<Waiting<Request>>,
) -> (InWork, Vec<Bytes>, Vec<Form>) {
    let rows = requests.iter().map(|r| r.rows).sum();
    let expected = front.queue.borrow().expected(rows);
    let sent = Instant::now();
    let hangs = sent + HANGS.max(expected * 20).max(front.spec.objective() * 20);
    if let Some(oldest) = requests.iter().map(|r| r.arrived).min() {
        front.work_begins(queue::InWork { oldest, sent, rows });
    }
    let (mut data, mut forms) = (Vec::new(), Vec::new());
    if let Some(Content::Tensors(first)) = requests.first().map(|r| &r.what.content) {
        for (i, input) in first.inputs.iter().enumerate() {
            let mut form = input.form.clone();
            form.shape[0] = rows;
            forms.push(form);
            for request in &requests {
                if let Content::Tensors(infer) = &request.what.content {
                    data.push(infer.inputs[i].data.clone());
                }
            }
        }
    }
    (InWork { id, rows, sent, hangs, requests }, data, forms)
}

fn message(work: &InWork, inputs: Vec<Form>) -> Batch<'_> {
    let json = work.requests.iter().filter_map(|r| match &r.what.content {
        Content::Json(value) => Some(&**value),
        Content::Tensors(_) => None,
    });
    let (id, requests, json) = (work.id, work.requests.len(), json.collect());
    Batch { id, requests, inputs, json, shared: false }
}

/// Answers the requests of a batch. The error has the requests that are not answered, and why the
/// worker cannot go on.
fn take(
    front: &Front,
    work: Option<InWork>,
    message: FromWorker,
    data: &Bytes,
    shared: Option<&Shared>,
) -> Result<(), (Option<InWork>, String)> {
    let odd = |work, what: &str| Err((work, format!("the worker sent {what}")));
    let Some(work) = work else { return odd(None, "an answer that nobody asked for") };
    let (id, outcome) = match message {
        FromWorker::Ready(_) => return odd(Some(work), "`ready` twice"),
        FromWorker::Failed { id, what } => (id, Err(what)),
        FromWorker::Done(done) => (done.id, answers(&work, done, data, shared)),
    };
    if id != work.id {
        return odd(Some(work), "the answer to another batch");
    }
    let took = work.sent.elapsed();
    let done = front.work_ends();
    front.queue.borrow_mut().took(work.rows, took, done);
    front.stats.borrow_mut().batch(work.rows, took);
    match outcome {
        Err(what) => {
            for request in work.requests {
                let (status, end) = (500, End::Failed);
                let refusal = Refusal { status, end, what: what.clone(), retry_after_s: None };
                let _ = request.what.reply.send(Err(refusal));
            }
        }
        Ok(Answers::Json(all)) => {
            for (request, answer) in work.requests.into_iter().zip(all) {
                let _ = request.what.reply.send(Ok(Answer::Json(answer)));
            }
        }
        Ok(Answers::Tensors(all)) => {
            let mut from = 0;
            for request in work.requests {
                let rows = request.rows;
                let parts = all.iter().map(|t| t.part(from, rows)).collect();
                from += rows;
                if let Content::Tensors(infer) = request.what.content {
                    let _ = request.what.reply.send(Ok(Answer::Tensors(infer, parts)));
                }
            }
        }
    }
    Ok(())
}

enum Answers {
    Tensors(Vec<Tensor>),
    Json(Vec<Box<RawValue>>),
}

/// The answers to a batch, if there are as many as requests.
fn answers(
    work: &InWork,
    done: Done,
    data: &Bytes,
    shared: Option<&Shared>,
) -> Result<Answers, String> {
    let elsewhere = match shared {
        Some(shared) if done.shared => Some(shared.read(&done.outputs)?),
        _ => None,
    };
    let data = elsewhere.as_ref().unwrap_or(data);
    let is_json = matches!(work.requests.first().map(|r| &r.what.content), Some(Content::Json(_)));
    let requests = work.requests.len();
    match done.json {
        Some(all) if is_json && all.len() == requests => Ok(Answers::Json(all)),
        Some(all) if is_json => Err(format!("{} answers to {requests} requests", all.len())),
        None if !is_json => {
            let all = frame::outputs(done.outputs, data)?;
            let rows = work.rows;
            match all.iter().find(|t| t.form.shape.first() != Some(&rows)) {
                None => Ok(Answers::Tensors(all)),
                Some(t) => Err(format!(
                    "output {:?} has the shape {:?} for a batch of {rows}",
                    t.form.name, t.form.shape
                )),
            }
        }
        _ => Err("an answer of another kind than the request".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_crashes_end_the_front() {
        let mut crashes = Crashes::default();
        let at = Instant::now();
        let pauses: Vec<_> = (0..5).map(|_| crashes.another(at)).collect();
        assert_eq!(pauses[0], Some(PAUSE));
        assert_eq!(pauses[3], Some(PAUSE * 8));
        assert_eq!(pauses[4], None);
        assert_eq!(crashes.another(at + MINUTE), Some(PAUSE), "a minute later it is the first");
    }
}
