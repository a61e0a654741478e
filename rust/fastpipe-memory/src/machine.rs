//! The memory that is available to the process: the machine's, or less if a control group (container) limits it.

use std::sync::OnceLock;

/// Returns the total number of bytes, or `None` if the system doesn't report it. It is looked up only once.
pub fn machine_memory() -> Option<u64> {
    static MEMORY: OnceLock<Option<u64>> = OnceLock::new();
    *MEMORY.get_or_init(|| least_of(|path| std::fs::read_to_string(path).ok()))
}

/// Returns the bytes that can be used at present without evicting other processes or cached data. `None` if the system
/// doesn't report it. The value changes constantly.
pub fn available_memory() -> Option<u64> {
    left_of(|path| std::fs::read_to_string(path).ok())
}

/// Returns the minimum of the physical memory and the limits of the process's control group and its ancestors, of
/// version 1 or 2. `read` returns the text of a file.
fn least_of(read: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let physical = read("/proc/meminfo")
        .as_deref()
        .and_then(|text| field(text, "MemTotal:"));
    let limits = groups(&read)
        .into_iter()
        .filter_map(|group| number(read(&group.limit())));
    limits.chain(physical).min()
}

/// Like `least_of`, for memory that is still available. Inactive file caches of a control group count as free.
fn left_of(read: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let physical = read("/proc/meminfo")
        .as_deref()
        .and_then(|text| field(text, "MemAvailable:"));
    let left = groups(&read).into_iter().filter_map(|group| {
        let limit = number(read(&group.limit()))?;
        let used = number(read(&group.usage()))?;
        let statistics = read(&group.statistics()).unwrap_or_default();
        let words = ["inactive_file ", "total_inactive_file "];
        let files = statistics
            .lines()
            .find_map(|line| words.iter().find_map(|word| line.strip_prefix(word)));
        let files = files.and_then(|number| number.trim().parse::<u64>().ok()).unwrap_or(0);
        Some(limit.saturating_sub(used.saturating_sub(files)))
    });
    left.chain(physical).min()
}

/// Parses a file that contains a single number. For "no limit", version 1 uses a number near 2^63 and version 2 a word.
fn number(text: Option<String>) -> Option<u64> {
    text?.trim().parse().ok()
}

/// Parses a line of `/proc/meminfo`, whose unit is KiB.
fn field(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// A control group of version 1 or 2.
struct Group {
    directory: String,
    first: bool,
}

impl Group {
    fn file(&self, first: &str, second: &str) -> String {
        format!("{}/{}", self.directory, if self.first { first } else { second })
    }

    fn limit(&self) -> String {
        self.file("memory.limit_in_bytes", "memory.max")
    }

    fn usage(&self) -> String {
        self.file("memory.usage_in_bytes", "memory.current")
    }

    fn statistics(&self) -> String {
        self.file("memory.stat", "memory.stat")
    }
}

/// Returns the process's control group and its ancestors. Lines have the form `number:controllers:path`. In version 2,
/// the controllers are empty.
fn groups(read: &impl Fn(&str) -> Option<String>) -> Vec<Group> {
    let lines = read("/proc/self/cgroup").unwrap_or_default();
    let of_line = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let first = controllers.split(',').any(|name| name == "memory");
        let mount = if first {
            "/sys/fs/cgroup/memory"
        } else {
            "/sys/fs/cgroup"
        };
        let all = around(path).map(|path| Group {
            directory: format!("{mount}{path}"),
            first,
        });
        (first || controllers.is_empty()).then(|| all.collect::<Vec<_>>())
    };
    lines.lines().filter_map(of_line).flatten().collect()
}

/// Yields a path and its ancestors, including the root, which is an empty path. In a container, the container's group
/// is mounted as the root.
fn around(path: &str) -> impl Iterator<Item = &str> {
    let path = path.trim_end_matches('/');
    std::iter::successors(Some(path), |path| path.rfind('/').map(|end| &path[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Option<u64> {
        least_of(|path| {
            files
                .iter()
                .find(|(name, _)| *name == path)
                .map(|(_, text)| (*text).into())
        })
    }

    #[test]
    fn the_smallest_limit_applies() {
        const MEMINFO: (&str, &str) = ("/proc/meminfo", "MemTotal:       16384 kB\nMemFree:  1 kB\n");
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[MEMINFO]), Some(16 << 20));
        let v2 = ("/proc/self/cgroup", "0::/a/b\n");
        for (at, limit) in [("/a/b", 5), ("/a", 6), ("", 7)] {
            let (file, text) = (format!("/sys/fs/cgroup{at}/memory.max"), format!("{limit}\n"));
            assert_eq!(found(&[MEMINFO, v2, (&file, &text)]), Some(limit), "{at}");
            assert_eq!(found(&[MEMINFO, v2, (&file, "max\n")]), Some(16 << 20));
        }
        let v1 = ("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/\n");
        for (limit, least) in [("9000", 9000), ("9223372036854771712", 16 << 20)] {
            let file = ("/sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", limit);
            assert_eq!(found(&[MEMINFO, v1, file]), Some(least));
        }
        assert_eq!(
            found(&[v1, ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "77")]),
            Some(77)
        );
    }

    #[test]
    fn memory_used_by_a_group_is_not_available_except_file_pages() {
        let left = |files: &[(&str, &str)]| {
            let read = |path: &str| {
                files
                    .iter()
                    .find(|(name, _)| *name == path)
                    .map(|(_, text)| (*text).into())
            };
            left_of(read)
        };
        const MEMINFO: (&str, &str) = ("/proc/meminfo", "MemTotal: 16384 kB\nMemAvailable:  8192 kB\n");
        assert_eq!(left(&[]), None);
        assert_eq!(left(&[MEMINFO]), Some(8 << 20));
        let v2 = ("/proc/self/cgroup", "0::/a\n");
        let (limit, used) = (
            ("/sys/fs/cgroup/a/memory.max", "1000\n"),
            ("/sys/fs/cgroup/a/memory.current", "900\n"),
        );
        assert_eq!(left(&[MEMINFO, v2, limit, used]), Some(100));
        let files = ("/sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 300\n");
        assert_eq!(left(&[MEMINFO, v2, limit, used, files]), Some(400));
        let unlimited = ("/sys/fs/cgroup/a/memory.max", "max\n");
        assert_eq!(left(&[MEMINFO, v2, unlimited, used, files]), Some(8 << 20));
        let v1 = ("/proc/self/cgroup", "4:memory:/d\n");
        let limit = ("/sys/fs/cgroup/memory/d/memory.limit_in_bytes", "100\n");
        let used = ("/sys/fs/cgroup/memory/d/memory.usage_in_bytes", "120\n");
        assert_eq!(left(&[MEMINFO, v1, limit, used]), Some(0));
        let files = ("/sys/fs/cgroup/memory/d/memory.stat", "total_inactive_file 90\n");
        assert_eq!(left(&[MEMINFO, v1, limit, used, files]), Some(70));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_some() {
        assert!(machine_memory().is_some_and(|bytes| bytes > 64 << 20));
        assert!(available_memory().is_some_and(|bytes| bytes > 1 << 20));
    }
}
