function __ckpt_completion
    set -lx _CKPT_COMPLETE complete_fish
    set -lx _TYPER_COMPLETE_FISH_ACTION get-args
    set -lx _TYPER_COMPLETE_ARGS (commandline -cp | string collect)
    set -l found (ckpt 2>/dev/null | string match -r '.+')
    # Of --dtype=bf the whole word is completed.
    set -l before (commandline -ct | string match -r '^--[^=]*=')
    if test (count $found) -gt 0
        printf "$before%s\n" $found
    else
        __fish_complete_path (commandline -ct)
    end
end

for name in ckpt unshard
    complete --command $name --no-files --arguments '(__ckpt_completion)'
end
