//! `roommate top`: a live view of the machine.
//!
//! One thread queries the daemon, the other draws and handles keys, so that the screen reports a
//! daemon that hangs or has ended and still responds to `q`.

mod draw;
mod screen;

use crate::cli::machine::Top;
use crate::console;
use anyhow::Context;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use roommate_agent::api::control::{Reply, Request};
use roommate_agent::process::signal;
use roommate_agent::{AgentError, Client};
use screen::{Do, Key, Screen, Snapshot};
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// Longest wait for a key before new answers of the daemon are drawn.
const LOOK: Duration = Duration::from_millis(100);
/// Width of a frame that is not drawn on a terminal.
const USUAL_WIDTH: u16 = 100;

pub(super) fn run(args: &Top) -> anyhow::Result<ExitCode> {
    let client = super::machine::client(&args.at)?;
    if args.once || !io::stdout().is_terminal() {
        let mut screen = Screen::default();
        screen.take(Ok(look(&client)?));
        // Printed text has no selection and no list of keys.
        (screen.at, screen.message) = (None, Some(String::new()));
        let (width, height) =
            args.size.unwrap_or_else(|| (USUAL_WIDTH, draw::natural_height(&screen)));
        console::print(&frame_as_text(&screen, width, height)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let wanted = signal::end_wanted()?;
    let (ask, asked) = mpsc::channel();
    let (send, answers) = mpsc::channel();
    let every = Duration::from_secs_f64(args.every);
    std::thread::Builder::new()
        .name("asks".into())
        .spawn(move || keep_asking(&client, every, &asked, &send))
        .context("could not start a thread")?;
    // Also restores the terminal after a panic.
    let mut terminal = ratatui::try_init().context("could not draw on this terminal")?;
    let watched = watch(&mut terminal, &answers, &ask, &wanted);
    ratatui::restore();
    watched.context("could not draw on this terminal")?;
    Ok(ExitCode::SUCCESS)
}

/// Messages of the thread that queries the daemon.
enum News {
    Looked(Box<Result<Snapshot, String>>),
    Message(String),
}

fn look(client: &Client) -> Result<Snapshot, AgentError> {
    let odd =
        || AgentError::Refused { what: "unexpected reply from the daemon".into(), hint: None };
    let Reply::Machine(machine) = client.ask(&Request::Machine {})? else { return Err(odd()) };
    let Reply::Jobs(jobs) = client.ask(&Request::Ps {})? else { return Err(odd()) };
    Ok(Snapshot { machine: *machine, jobs })
}

fn keep_asking(client: &Client, every: Duration, asked: &Receiver<Request>, send: &Sender<News>) {
    loop {
        let looked = look(client).map_err(|e| e.to_string());
        if send.send(News::Looked(Box::new(looked))).is_err() {
            return;
        }
        match asked.recv_timeout(every) {
            Ok(request) => {
                let message = match client.ask(&request) {
                    Ok(Reply::Done { what }) => what,
                    Ok(_) => "done".into(),
                    Err(e) => e.to_string(),
                };
                let _ = send.send(News::Message(message));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    answers: &Receiver<News>,
    ask: &Sender<Request>,
    wanted: &AtomicBool,
) -> io::Result<()> {
    let mut screen = Screen::default();
    loop {
        terminal.draw(|frame| draw::draw(frame, &screen))?;
        let has_event = event::poll(LOOK)?;
        if wanted.load(Ordering::Relaxed) {
            return Ok(());
        }
        if has_event
            && let Event::Key(key) = event::read()?
            && key.kind == KeyEventKind::Press
        {
            match meaning(key).map(|key| screen.press(key)) {
                Some(Do::Quit) => return Ok(()),
                Some(Do::Ask(request)) => {
                    let _ = ask.send(request);
                }
                Some(Do::Nothing) => {}
                None if is_interrupt(key) => return Ok(()),
                None => {}
            }
        }
        for news in answers.try_iter() {
            match news {
                News::Looked(looked) => screen.take(*looked),
                News::Message(message) => screen.message = Some(message),
            }
        }
    }
}

/// In raw mode the terminal does not turn Ctrl-C into a signal.
fn is_interrupt(key: KeyEvent) -> bool {
    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL)
}

fn meaning(key: KeyEvent) -> Option<Key> {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return None;
    }
    Some(match key.code {
        KeyCode::Up | KeyCode::Char('k') => Key::Up,
        KeyCode::Down | KeyCode::Char('j') => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Char(c) => Key::Letter(c),
        _ => return None,
    })
}

/// One frame as plain text.
fn frame_as_text(screen: &Screen, width: u16, height: u16) -> anyhow::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height))?;
    terminal.draw(|frame| draw::draw(frame, screen))?;
    Ok(as_text(terminal.backend().buffer()))
}

fn as_text(buffer: &Buffer) -> String {
    let mut text = String::new();
    for y in 0..buffer.area.height {
        let cells = (0..buffer.area.width).map(|x| buffer[(x, y)].symbol());
        text += cells.collect::<String>().trim_end();
        text.push('\n');
    }
    text.trim_end().to_string() + "\n"
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "these are tests")]
mod tests;
