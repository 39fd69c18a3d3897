//! The text format in which Prometheus reads metrics, version 0.0.4.

use std::fmt::Write as _;
use std::time::Duration;

/// The content type of a [`Page`]: Prometheus refuses an answer without one.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Metrics as text, a family after the other.
#[derive(Clone, Debug, Default)]
pub struct Page(String);

/// The samples of one metric: what was begun last on its page.
pub struct Family<'a> {
    page: &'a mut Page,
    name: &'a str,
}

impl Page {
    /// Begins a gauge.
    pub fn gauge<'a>(&'a mut self, name: &'a str, help: &str) -> Family<'a> {
        self.begin(name, help, "gauge")
    }

    /// Begins a counter; its name ends with `_total`.
    pub fn counter<'a>(&'a mut self, name: &'a str, help: &str) -> Family<'a> {
        self.begin(name, help, "counter")
    }

    /// Begins a histogram.
    pub fn histogram<'a>(&'a mut self, name: &'a str, help: &str) -> Family<'a> {
        self.begin(name, help, "histogram")
    }

    /// The whole text.
    pub fn text(self) -> String {
        self.0
    }

    fn begin<'a>(&'a mut self, name: &'a str, help: &str, kind: &str) -> Family<'a> {
        _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Family { page: self, name }
    }
}

impl Family<'_> {
    /// Adds a sample of a gauge or a counter.
    pub fn add(&mut self, labels: &[(&str, &str)], value: f64) -> &mut Self {
        self.line("", labels, value);
        self
    }

    /// Adds the durations of a histogram.
    pub fn add_durations(&mut self, labels: &[(&str, &str)], all: &Histogram) -> &mut Self {
        let mut below = 0;
        for (bound, n) in all.bounds.iter().zip(&all.classes) {
            below += n;
            let bound = bound.to_string();
            self.line("_bucket", &[labels, &[("le", &bound)]].concat(), below as f64);
        }
        self.line("_bucket", &[labels, &[("le", "+Inf")]].concat(), all.count as f64);
        self.line("_sum", labels, all.sum_s);
        self.line("_count", labels, all.count as f64);
        self
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &str)], value: f64) {
        let text = &mut self.page.0;
        _ = write!(text, "{}{suffix}", self.name);
        for (at, (name, value)) in labels.iter().enumerate() {
            let before = if at == 0 { '{' } else { ',' };
            _ = write!(text, "{before}{name}=\"{}\"", escaped(value));
        }
        let end = if labels.is_empty() { "" } else { "}" };
        _ = writeln!(text, "{end} {value}");
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

/// Durations, by class.
#[derive(Clone, Debug)]
pub struct Histogram {
    /// Upper bounds of the classes, in seconds.
    bounds: &'static [f64],
    classes: Vec<u64>,
    count: u64,
    sum_s: f64,
}

impl Histogram {
    /// An empty one with these upper bounds in seconds, ascending.
    pub fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, classes: vec![0; bounds.len()], count: 0, sum_s: 0.0 }
    }

    /// Counts a duration.
    pub fn add(&mut self, duration: Duration) {
        let s = duration.as_secs_f64();
        self.count += 1;
        self.sum_s += s;
        if let Some(class) = self.bounds.iter().position(|bound| s <= *bound) {
            self.classes[class] += 1;
        }
    }

    /// Durations that were counted.
    pub fn count(&self) -> u64 {
        self.count
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// The names of all samples of a page; fails where the page is not as Prometheus and its
    /// naming rules want it.
    pub(crate) fn checked(text: &str) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        let mut seen = BTreeSet::new();
        let mut families: BTreeMap<&str, &str> = BTreeMap::new();
        let mut now = ("", "");
        let mut last_help = "";
        let mut buckets: BTreeMap<String, f64> = BTreeMap::new();
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, words) = help.split_once(' ').expect(line);
                assert!(words.ends_with('.') && words.len() > 5, "help: {line}");
                last_help = name;
                continue;
            }
            if let Some(kind) = line.strip_prefix("# TYPE ") {
                now = kind.split_once(' ').expect(line);
                assert_eq!(now.0, last_help, "HELP and TYPE are of one metric");
                assert!(families.insert(now.0, now.1).is_none(), "{} is there twice", now.0);
                check_name(now.0, now.1);
                continue;
            }
            let (series, value) = line.rsplit_once(' ').expect(line);
            let value: f64 = value.parse().expect(line);
            assert!(value.is_finite() && seen.insert(series.to_string()), "{line}");
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let labels = parsed(labels);
            names.insert(name.to_string());
            let suffix = name.strip_prefix(now.0).expect(line);
            let allowed: &[&str] = match now.1 {
                "histogram" => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            assert!(allowed.contains(&suffix), "{line} is not of {}", now.0);
            let same: String =
                labels.iter().filter(|l| l.0 != "le").map(|l| l.1.as_str()).collect();
            let key = format!("{} {same}", now.0);
            match suffix {
                "_bucket" => {
                    let before = buckets.insert(key, value).unwrap_or(0.0);
                    assert!(value >= before, "buckets do not descend: {line}");
                }
                "_count" => assert_eq!(buckets.get(&key), Some(&value), "{line}"),
                _ => {}
            }
        }
        names
    }

    fn check_name(name: &str, kind: &str) {
        let plain = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        assert!(plain && name.starts_with("roommate_"), "{name}");
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name} is a {kind}");
        for unit in ["_ms", "_us", "_mib", "_mb", "_percent", "_permille", "_minutes"] {
            assert!(!name.trim_end_matches("_total").ends_with(unit), "{name}: not a base unit");
        }
        assert!(kind != "histogram" || name.ends_with("_seconds"), "{name}");
    }

    /// `a="b",c="d"}` as pairs.
    fn parsed(labels: &str) -> Vec<(String, String)> {
        let mut pairs = Vec::new();
        let mut rest = labels.strip_suffix('}').unwrap_or(labels);
        while !rest.is_empty() {
            let (name, value) = rest.split_once("=\"").expect(labels);
            let mut text = String::new();
            let mut chars = value.char_indices();
            let end = loop {
                match chars.next().expect(labels) {
                    (_, '\\') => match chars.next().expect(labels).1 {
                        'n' => text.push('\n'),
                        c @ ('\\' | '"') => text.push(c),
                        c => panic!("\\{c} in {labels}"),
                    },
                    (at, '"') => break at,
                    (_, c) => text.push(c),
                }
            };
            pairs.push((name.trim_start_matches(',').to_string(), text));
            rest = &value[end + 1..];
        }
        pairs
    }

    #[test]
    fn values_of_labels_are_escaped() {
        let mut page = Page::default();
        let odd = "a\"b\\c\nd";
        page.gauge("roommate_x", "Something.").add(&[("node", odd), ("gpu", "0")], 1.5);
        let text = page.text();
        assert_eq!(text.lines().last(), Some(r#"roommate_x{node="a\"b\\c\nd",gpu="0"} 1.5"#));
        assert_eq!(checked(&text).len(), 1);
        let labels =
            text.lines().last().and_then(|l| Some(l.split_once('{')?.1.rsplit_once(' ')?.0));
        let pairs = parsed(labels.unwrap());
        assert_eq!(pairs, [("node".into(), odd.into()), ("gpu".into(), "0".into())]);
    }

    #[test]
    fn classes_of_a_histogram_add_up() {
        let mut all = Histogram::new(&[0.001, 0.005, 30.0]);
        for ms in [1, 3, 400, 60_000] {
            all.add(Duration::from_millis(ms));
        }
        let mut page = Page::default();
        page.histogram("roommate_x_seconds", "Something.").add_durations(&[("result", "ok")], &all);
        let text = page.text();
        checked(&text);
        for line in [
            r#"roommate_x_seconds_bucket{result="ok",le="0.001"} 1"#,
            r#"roommate_x_seconds_bucket{result="ok",le="0.005"} 2"#,
            r#"roommate_x_seconds_bucket{result="ok",le="30"} 3"#,
            r#"roommate_x_seconds_bucket{result="ok",le="+Inf"} 4"#,
            r#"roommate_x_seconds_count{result="ok"} 4"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    }
}
