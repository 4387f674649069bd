_ckpt_completion() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("${line%%$'\t'*}")
    done < <(_CKPT_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
        _TYPER_COMPLETE_ARGS="${COMP_LINE:0:COMP_POINT}" "$1" 2>/dev/null)
    [[ ${COMPREPLY[*]} == "" ]] && COMPREPLY=()
    return 0
}

complete -o default -F _ckpt_completion ckpt unshard
