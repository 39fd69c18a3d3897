//! Draws a [`Screen`]. It is readable without colour, so that a frame can be printed as text.

use super::super::machine;
use super::screen::{Mode, Screen, Snapshot};
use crate::table;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};
use roommate_agent::api::control::JobView;
use roommate_agent::api::event_text::EventLine;

/// Smallest terminal (columns, rows) that is drawn on.
pub(super) const SMALLEST: (u16, u16) = (60, 12);
const COLOURS: [Color; 6] =
    [Color::Cyan, Color::Green, Color::Yellow, Color::Magenta, Color::Blue, Color::Red];
const QUIET: Style = Style::new().fg(Color::DarkGray);
const HEADING: Style = Style::new().add_modifier(Modifier::BOLD);

/// Number of rows that show everything.
pub(super) fn natural_height(screen: &Screen) -> u16 {
    let devices = screen.snapshot.as_ref().map_or(0, |s| s.machine.devices as usize);
    let events = screen.snapshot.as_ref().map_or(0, |s| s.machine.recent.len().min(8));
    let rows = devices + screen.tenants().len().max(1) + screen.queue().len().max(1) + events;
    (rows + 8).min(500) as u16
}

pub(super) fn draw(frame: &mut Frame<'_>, screen: &Screen) {
    let area = frame.area();
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        let (w, h) = SMALLEST;
        frame.render_widget(Paragraph::new(format!("needs {w} columns and {h} rows")), area);
        return;
    }
    let rows = [Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)];
    let [head, body, foot] = Layout::vertical(rows).areas(area);
    frame.render_widget(header(screen), head);
    frame.render_widget(footer(screen), foot);
    let Some(snapshot) = &screen.snapshot else { return };
    if screen.mode == Mode::Detail {
        detail(frame, body, screen, snapshot);
    } else {
        overview(frame, body, screen, snapshot);
    }
}

fn header(screen: &Screen) -> Line<'static> {
    if let Some(why) = &screen.lost {
        let text = format!("no answer, trying again: {why}");
        return Line::styled(text, Style::new().fg(Color::Red).add_modifier(Modifier::BOLD));
    }
    let Some(Snapshot { machine: m, jobs }) = &screen.snapshot else {
        return Line::raw("waiting for the daemon");
    };
    let ended = jobs.iter().filter(|j| j.ended).count();
    let failed = jobs.iter().filter(|j| j.ended && j.state.starts_with("failed")).count();
    let failed = if failed > 0 { format!(", {failed} failed") } else { String::new() };
    Line::from(vec![
        Span::styled("roommate", HEADING),
        Span::raw(format!(
            "  {}  {}  {}  up {}  {ended} ended{failed}",
            table::count(u64::from(m.devices), "device"),
            m.policy,
            m.enforcement.tier,
            table::figure(Some(m.up_s), "s"),
        )),
    ])
}

fn footer(screen: &Screen) -> Line<'static> {
    if screen.mode == Mode::Confirm {
        let job = screen.at.clone().unwrap_or_default();
        let text = format!("cancel {job}? y cancels it, any other key does not");
        return Line::styled(text, Style::new().fg(Color::Black).bg(Color::Yellow));
    }
    if let Some(message) = &screen.message {
        return Line::styled(message.clone(), HEADING);
    }
    let keys = match screen.mode {
        Mode::Detail => "s suspend  r resume  c cancel  esc back",
        _ => "arrows choose  enter details  s suspend  r resume  c cancel  o order  q quit",
    };
    Line::styled(keys, QUIET)
}

/// Rows of each section: at most a quarter each for devices and events; the rest is for tenants and
/// the queue.
fn heights(height: u16, devices: usize, tenants: usize, waiting: usize, events: usize) -> [u16; 4] {
    let height = usize::from(height);
    let quarter = (height / 4).max(2);
    // Each section has a heading.
    let devices = 1 + devices.min(quarter);
    let events = 1 + events.min(quarter).min(height.saturating_sub(devices + 8));
    let rest = height.saturating_sub(devices + events);
    let (tenants, waiting) = (2 + tenants.max(1), 1 + waiting.max(1));
    let least = waiting.min(rest / 3);
    let tenants = tenants.min(rest - least);
    let waiting = waiting.min(rest - tenants);
    [devices, tenants, waiting, events].map(|h| h as u16)
}

fn overview(frame: &mut Frame<'_>, area: Rect, screen: &Screen, snapshot: &Snapshot) {
    let (tenants, queue) = (screen.tenants(), screen.queue());
    let machine = &snapshot.machine;
    let [d, t, q, e] = heights(
        area.height,
        machine.devices as usize,
        tenants.len(),
        queue.len(),
        machine.recent.len(),
    );
    let rows = [d, t, q].map(Constraint::Length);
    let [devices_at, tenants_at, queue_at, events_at] =
        Layout::vertical([rows[0], rows[1], rows[2], Constraint::Min(e)]).areas(area);
    devices(frame, devices_at, machine.devices, snapshot);
    tenant_table(frame, tenants_at, screen, snapshot, &tenants);
    queue_table(frame, queue_at, screen, &queue);
    events(frame, events_at, "last events", machine.recent.iter());
}

fn title(text: String, width: u16) -> Line<'static> {
    let rule = usize::from(width).saturating_sub(text.chars().count() + 1);
    Line::from(vec![
        Span::styled(text, HEADING),
        Span::styled(format!(" {}", "─".repeat(rule)), QUIET),
    ])
}

/// The letter and the colour of a job in the bars of the devices.
fn mark(job: &JobView) -> (char, Color) {
    let letter = char::from(b'a' + (job.idx % 26) as u8);
    (letter, COLOURS[job.idx as usize % COLOURS.len()])
}

fn devices(frame: &mut Frame<'_>, area: Rect, count: u32, snapshot: &Snapshot) {
    let on = |device: u32| -> Vec<&JobView> {
        snapshot.jobs.iter().filter(|j| !j.ended && j.devices.contains(&device)).collect()
    };
    let busy = (0..count).filter(|d| !on(*d).is_empty()).count();
    let shown = u32::from(area.height.saturating_sub(1)).min(count);
    let more = if shown < count { format!(", first {shown} shown") } else { String::new() };
    let mut lines = vec![title(format!("devices: {busy} of {count} in use{more}"), area.width)];
    let bar = usize::from(area.width / 3);
    for device in 0..shown {
        let tenants = on(device);
        let mut spans = vec![Span::raw(format!("{device:>3} "))];
        spans.extend(bar_of(&tenants, bar));
        let names: Vec<String> = tenants
            .iter()
            .map(|j| format!("{} {} {}", mark(j).0, j.name, machine::share(j)))
            .collect();
        let load = snapshot.machine.gpus.get(device as usize).and_then(machine::gpu_load);
        let text = if names.is_empty() { "idle".into() } else { names.join(", ") };
        let text = load.map_or(text.clone(), |load| format!("{load}  {text}"));
        spans.push(Span::styled(
            format!(" {text}"),
            if names.is_empty() { QUIET } else { Style::new() },
        ));
        lines.push(Line::from(spans));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// Part of a device's bar for each tenant: its share, or an equal part of the rest for tenants
/// without a share.
fn parts(shares: &[f64]) -> Vec<f64> {
    let promised: f64 = shares.iter().sum();
    let free = shares.iter().filter(|s| **s == 0.0).count();
    let scale = promised.max(1.0);
    let left = (1.0 - promised / scale).max(0.0);
    shares.iter().map(|s| if *s == 0.0 { left / free as f64 } else { s / scale }).collect()
}

fn bar_of(tenants: &[&JobView], width: usize) -> Vec<Span<'static>> {
    let shares: Vec<f64> = tenants.iter().map(|j| j.share.get()).collect();
    let mut spans = vec![Span::styled("▕", QUIET)];
    let (mut at, mut sum) = (0, 0.0);
    for (job, part) in tenants.iter().zip(parts(&shares)) {
        sum += part;
        let to = ((sum * width as f64).round() as usize).min(width);
        let (letter, colour) = mark(job);
        let text: String = std::iter::repeat_n(letter, to - at).collect();
        let still = job.state == "suspended";
        let style =
            if still { Style::new().fg(colour) } else { Style::new().fg(Color::Black).bg(colour) };
        spans.push(Span::styled(text, style));
        at = to;
    }
    spans.push(Span::styled("·".repeat(width - at), QUIET));
    spans.push(Span::styled("▏", QUIET));
    spans
}

fn tenant_table(
    frame: &mut Frame<'_>,
    area: Rect,
    screen: &Screen,
    snapshot: &Snapshot,
    tenants: &[&JobView],
) {
    let head =
        format!("{} by {}", table::count(tenants.len() as u64, "tenant"), screen.order.name());
    let [title_at, rest] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    frame.render_widget(title(head, area.width), title_at);
    if tenants.is_empty() {
        let any = snapshot.jobs.iter().any(|j| !j.ended);
        let text = if any {
            "  no job is running"
        } else {
            "  no jobs; submit some with `roommate submit`"
        };
        frame.render_widget(Paragraph::new(text).style(QUIET), rest);
        return;
    }
    let names = ["", "name", "state", "class", "done", "step", "batch", "share", "memory", "left"];
    let right = |text: String, width: usize| Cell::from(format!("{text:>width$}"));
    let or = |v: Option<String>| v.unwrap_or_else(|| "-".into());
    let rows = tenants.iter().map(|j| {
        let (letter, colour) = mark(j);
        Row::new([
            Cell::from(letter.to_string()).style(Style::new().fg(colour)),
            Cell::from(j.name.clone()),
            Cell::from(j.state.clone()).style(state_style(&j.state)),
            Cell::from(class(&j.class)),
            right(or(progress(j)), 4),
            right(or(j.step_s.map(machine::seconds)), 8),
            right(or(j.batch.map(|b| b.to_string())), 5),
            right(machine::share(j), 5),
            right(or(machine::memory(j)), 9),
            right(or(j.left_s.map(|s| table::figure(Some(s), "s"))), 8),
        ])
    });
    let widths = [
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(9),
        Constraint::Length(5),
        Constraint::Length(4),
        Constraint::Length(8),
        Constraint::Length(5),
        Constraint::Length(if tenants.iter().any(|j| j.pace < 1.0) { 11 } else { 5 }),
        Constraint::Length(9),
        Constraint::Length(8),
    ];
    let at_right = |(i, name): (usize, &&str)| match i {
        4 => right(name.to_string(), 4),
        5 | 9 => right(name.to_string(), 8),
        6 | 7 => right(name.to_string(), 5),
        8 => right(name.to_string(), 9),
        _ => Cell::from(name.to_string()),
    };
    let header = Row::new(names.iter().enumerate().map(at_right)).style(QUIET);
    pointed_table(frame, rest, screen, tenants, Table::new(rows, widths).header(header));
}

fn queue_table(frame: &mut Frame<'_>, area: Rect, screen: &Screen, queue: &[&JobView]) {
    let [title_at, rest] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    let head = format!("{} waiting", table::count(queue.len() as u64, "job"));
    frame.render_widget(title(head, area.width), title_at);
    let rows = queue.iter().map(|j| {
        let wants = format!("{} dev", j.wants);
        Row::new([
            Cell::from(""),
            Cell::from(j.name.clone()),
            Cell::from(j.state.clone()).style(state_style(&j.state)),
            Cell::from(class(&j.class)),
            Cell::from(wants),
            Cell::from(format!("{:>8}", table::figure(Some(j.age_s), "s"))),
            Cell::from(j.why.clone().unwrap_or_else(|| "-".into())),
        ])
    });
    let names = queue.iter().map(|j| j.name.chars().count()).max().unwrap_or(0);
    let widths = [
        Constraint::Length(1),
        Constraint::Length(names.clamp(8, 24) as u16),
        Constraint::Length(15),
        Constraint::Length(5),
        Constraint::Length(6),
        Constraint::Length(8),
        Constraint::Fill(1),
    ];
    pointed_table(frame, rest, screen, queue, Table::new(rows, widths));
}

/// A table in which the selected job is highlighted and visible.
fn pointed_table(
    frame: &mut Frame<'_>,
    area: Rect,
    screen: &Screen,
    jobs: &[&JobView],
    table: Table<'_>,
) {
    let at = screen.at.as_ref().and_then(|at| jobs.iter().position(|j| j.name == *at));
    let table =
        table.column_spacing(1).row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(at));
}

fn events<'a>(
    frame: &mut Frame<'_>,
    area: Rect,
    head: &str,
    recent: impl DoubleEndedIterator<Item = &'a EventLine>,
) {
    if area.height == 0 {
        return;
    }
    let mut lines: Vec<Line<'_>> = recent
        .rev()
        .take(usize::from(area.height) - 1)
        .map(|t| {
            let at = table::figure(Some(t.at_s), "s");
            Line::from(vec![
                Span::styled(format!("{at:>9}  "), QUIET),
                Span::raw(format!("{}  {}", t.job, t.what)),
            ])
        })
        .collect();
    lines.push(title(head.to_string(), area.width));
    lines.reverse();
    frame.render_widget(Paragraph::new(lines), area);
}

fn detail(frame: &mut Frame<'_>, area: Rect, screen: &Screen, snapshot: &Snapshot) {
    let Some(job) = screen.pointed() else {
        frame.render_widget(Paragraph::new("the daemon no longer has this job"), area);
        return;
    };
    // What is not known or set gives its row to the events.
    let rows = machine::job_rows(job).into_iter().filter(|(_, value)| value != "-");
    let mut lines = vec![title(job.name.clone(), area.width)];
    for (name, value) in rows {
        lines.push(Line::from(vec![Span::styled(format!("{name:<12}"), QUIET), Span::raw(value)]));
    }
    let [of_job, rest] =
        Layout::vertical([Constraint::Length(lines.len() as u16), Constraint::Min(0)]).areas(area);
    frame.render_widget(Paragraph::new(lines), of_job);
    let its = snapshot.machine.recent.iter().filter(|t| t.job == job.name);
    events(frame, rest, "its last events", its);
}

fn state_style(state: &str) -> Style {
    match state {
        "running" => Style::new().fg(Color::Green),
        "suspended" | "waits in memory" => Style::new().fg(Color::Yellow),
        "backing off" => Style::new().fg(Color::Red),
        _ => Style::new(),
    }
}

/// A class in at most five letters.
fn class(class: &str) -> String {
    match class {
        "guaranteed" => "guar.",
        "best-effort" => "best",
        "service" => "serv.",
        other => other,
    }
    .into()
}

fn progress(j: &JobView) -> Option<String> {
    j.steps.filter(|all| *all > 0.0).map(|all| format!("{:.0}%", 100.0 * (j.done / all).min(1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_device_add_up_to_at_most_one() {
        assert_eq!(parts(&[1.0]), [1.0]);
        assert_eq!(parts(&[0.5, 0.25]), [0.5, 0.25]);
        assert_eq!(parts(&[0.5, 0.0, 0.0]), [0.5, 0.25, 0.25]);
        assert_eq!(parts(&[1.0, 1.0]), [0.5, 0.5]);
        assert_eq!(parts(&[1.0, 0.0]), [1.0, 0.0]);
        assert_eq!(parts(&[0.0]), [1.0]);
    }

    #[test]
    fn sections_fit_every_height() {
        for height in 10..80 {
            for (devices, tenants, waiting) in [(1, 0, 0), (8, 3, 50), (200, 200, 1000), (2, 40, 0)]
            {
                let parts = heights(height, devices, tenants, waiting, 50);
                assert!(parts.iter().sum::<u16>() <= height, "{height}: {parts:?}");
                assert!(parts[1] >= 3, "{height}: {parts:?}");
            }
        }
    }
}
