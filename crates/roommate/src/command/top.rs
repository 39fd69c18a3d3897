//! `roommate top`: what happens on the machine, as it happens.
//!
//! One thread asks the daemon, the other draws and hears keys: a daemon that hangs or goes away leaves a
//! screen that says so and still obeys `q`.

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

/// Keys are looked for this often, so that news of the daemon are drawn soon.
const LOOK: Duration = Duration::from_millis(100);
/// The size of a frame that nobody's terminal decides.
const USUAL_WIDTH: u16 = 100;

pub(super) fn run(args: &Top) -> anyhow::Result<ExitCode> {
    let client = super::machine::client(&args.at)?;
    if args.once || !io::stdout().is_terminal() {
        let mut screen = Screen::default();
        screen.take(Ok(look(&client)?));
        // Nobody presses keys on paper.
        (screen.at, screen.said) = (None, Some(String::new()));
        let (width, height) =
            args.size.unwrap_or_else(|| (USUAL_WIDTH, draw::natural_height(&screen)));
        console::print(&frame_as_text(&screen, width, height)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let wanted = signal::end_wanted()?;
    let (ask, asked) = mpsc::channel();
    let (tell, told) = mpsc::channel();
    let every = Duration::from_secs_f64(args.every);
    std::thread::Builder::new()
        .name("asks".into())
        .spawn(move || keep_asking(&client, every, &asked, &tell))
        .context("could not start a thread")?;
    // Restores the terminal if we panic, too.
    let mut terminal = ratatui::try_init().context("could not draw on this terminal")?;
    let watched = watch(&mut terminal, &told, &ask, &wanted);
    ratatui::restore();
    watched.context("could not draw on this terminal")?;
    Ok(ExitCode::SUCCESS)
}

/// What the asking thread says.
enum News {
    Looked(Box<Result<Snapshot, String>>),
    Said(String),
}

fn look(client: &Client) -> Result<Snapshot, AgentError> {
    let odd =
        || AgentError::Refused { what: "unexpected reply from the daemon".into(), hint: None };
    let Reply::Machine(machine) = client.ask(&Request::Machine {})? else { return Err(odd()) };
    let Reply::Jobs(jobs) = client.ask(&Request::Ps {})? else { return Err(odd()) };
    Ok(Snapshot { machine: *machine, jobs })
}

fn keep_asking(client: &Client, every: Duration, asked: &Receiver<Request>, tell: &Sender<News>) {
    loop {
        let looked = look(client).map_err(|e| e.to_string());
        if tell.send(News::Looked(Box::new(looked))).is_err() {
            return;
        }
        match asked.recv_timeout(every) {
            Ok(request) => {
                let said = match client.ask(&request) {
                    Ok(Reply::Done { what }) => what,
                    Ok(_) => "done".into(),
                    Err(e) => e.to_string(),
                };
                let _ = tell.send(News::Said(said));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    told: &Receiver<News>,
    ask: &Sender<Request>,
    wanted: &AtomicBool,
) -> io::Result<()> {
    let mut screen = Screen::default();
    loop {
        terminal.draw(|frame| draw::draw(frame, &screen))?;
        let heard = event::poll(LOOK)?;
        if wanted.load(Ordering::Relaxed) {
            return Ok(());
        }
        if heard
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
        for news in told.try_iter() {
            match news {
                News::Looked(looked) => screen.take(*looked),
                News::Said(said) => screen.said = Some(said),
            }
        }
    }
}

/// A terminal that passes keys on as they are does not turn ctrl-C into a signal.
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
